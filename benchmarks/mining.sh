# The commands of docs/results/mining.md. DIR is the sample that benchmarks/sample_sources.py DEBPKGS DIR writes, START is a run of 400 steps, INDEX the
# exact index of its vectors.

python -m jaxir.search --index=INDEX --queries=DIR/queries.jsonl --k=100 --output=train.trec
python -m jaxir.mine --run=train.trec --dataset=beir:DIR --first=1 --last=10 --negatives=5 --output=NEGATIVES
common="--gin_file=gin/models/minilm.gin --gin_file=gin/objectives/in_batch_softmax.gin --gin_file=gin/experiments/few_steps.gin \
    --gin.DATA=DIR --gin.MODEL=START --gin.QUERY_LENGTH=32 --gin.PASSAGE_LENGTH=128 --gin.DROPOUT=0.0 --gin.STEPS=250 --gin.BATCH_SIZE=32 \
    --gin.DEV_SPLIT=None --seed=1"
python -m jaxir.train $common --output_dir=IN_BATCH
python -m jaxir.train $common --gin_file=gin/experiments/mined.gin --gin.MINED=NEGATIVES/train.jsonl --gin.NEGATIVES=1 --output_dir=MINED
# For the last row of the table, run this after the search:
awk 'NR == FNR { test[$2]; next } !($3 in test)' DIR/qrels/test.tsv train.trec > control.trec
# Make the documents of the test. Each model encodes, indexes and searches them as in docs/tutorial.md:
awk -F'["\t]' 'NR == FNR { test[$2]; next } $4 in test' DIR/qrels/test.tsv DIR/corpus.jsonl > test.jsonl
