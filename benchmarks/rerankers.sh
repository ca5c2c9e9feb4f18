# The commands of docs/results/rerankers.md, to be run one by one. The split `few` (qrels/few.tsv) has 2,000 of the training judgements.

python -m jaxir.sample --dataset=beir:DEBPKGS --train=6400 --output=DIR
python -m jaxir.train --gin_file=gin/models/minilm.gin --gin_file=gin/objectives/samtone.gin --gin_file=gin/runs/few_steps.gin --gin.DATA=DIR \
    --gin.QUERY_LENGTH=24 --gin.PASSAGE_LENGTH=72 --gin.DEV_SPLIT=None \
    --gin.STEPS=150 --gin.TEMPERATURE=0.05 --seed=1 --output_dir=START
python -m jaxir.fuse --runs=bm25.trec,dense.trec --method=rrf --output=rrf.trec
python -m jaxir.mine --run=rrf.trec --dataset=beir:DIR --first=1 --last=60 --negatives=16 --output=NEG
python -m jaxir.train --gin_file=gin/reranker.gin --gin.MINED=NEG/train.jsonl --gin.DATA=DIR \
    --gin.QUERY_LENGTH=24 --gin.PASSAGE_LENGTH=56 --gin.DEV_SPLIT=None --gin.STEPS=200 --gin.BATCH_SIZE=8 \
    --gin.LEARNING_RATE=2e-4 --seed=1 --output_dir=CE
python -m jaxir.rerank --model=CE --run=bm25.trec --dataset=beir:DIR --output=reranked.trec
python -m jaxir.mine --run=dense.trec --dataset=beir:DIR --split=few --first=1 --last=10 --negatives=1 --seed=1 --output=MINED
python -m jaxir.mine --run=dense.trec --dataset=beir:DIR --split=few --first=1 --last=10 --negatives=1 --seed=1 --cross_encoder=CE \
    --relevance_margin=0.05 --output=FILTERED
python -m jaxir.mine --run=dense.trec --dataset=beir:DIR --split=few --first=1 --last=10 --negatives=1 --seed=1 --teacher=CE --output=SCORED
python -m jaxir.train --gin_file=gin/models/minilm.gin --gin_file=gin/objectives/samtone.gin --gin_file=gin/runs/few_steps.gin --gin.DATA=DIR \
    --gin.QUERY_LENGTH=24 --gin.PASSAGE_LENGTH=72 --gin.DEV_SPLIT=None \
    --gin.MODEL=START --gin.STEPS=60 --gin.TEMPERATURE=0.05 --seed=1 --gin_file=gin/experiments/mined.gin \
    --gin.MINED=MINED/train.jsonl --gin.NEGATIVES=1 --output_dir=RUN
# For the distilled model, use --gin.MINED=SCORED/train.jsonl and add --gin_file=gin/objectives/margin_mse.gin at the end. Before mining, remove
# documents of dev and test from the runs.
