# The commands of docs/results/unsupervised.md.
#
# These are the lines to run, not a script: names in capitals are directories and files of yours,
# which docs/results/unsupervised.md describes.

# Objectives from MiniLM and from random parameters
python -m jaxir.sample --dataset=beir:debpkgs --train=1000 --output=a
python -m jaxir.sample --dataset=beir:a --split=test --train=500 --output=b
python -m jaxir.sample --dataset=beir:b --split=dev --train=1 --output=SAMPLE
python -m jaxir.grid --gin_file=gin/experiments/texts_grid.gin --datasets=debpkgs=SAMPLE --judges=sts13=sts:sts13 --steps=32 --output_dir=MINILM \
    --objectives=simcse,simcse_nt_xent,simcse_bce,consert_1,consert_2,clm_autoencoder,mlm_autoencoder,multi_task,tsdae,cpdae,cpdae_r,seed,prop,ict \
    --untrained=MiniLM=st:sentence-transformers/all-MiniLM-L6-v2 \
    --bindings=STS=sickr/dev.tsv,PASSAGE_LENGTH=24,QUERY_LENGTH=24,BATCH_SIZE=32,EVAL_EVERY=0.25,CHECKPOINT_EVERY=10000
python -m jaxir.grid --gin_file=gin/experiments/texts_grid.gin --datasets=debpkgs=SAMPLE --judges=sts13=sts:sts13 --steps=48 --output_dir=SCRATCH \
    --objectives=simcse,simcse_nt_xent,simcse_bce,multi_task,tsdae \
    --bindings=STS=sickr/dev.tsv,PASSAGE_LENGTH=24,QUERY_LENGTH=24,BATCH_SIZE=32,EVAL_EVERY=0.25,CHECKPOINT_EVERY=10000,FROM_SCRATCH=True,LEARNING_RATE=3e-4

# Batches, corpora, weights, other judges
GRID="--gin_file=gin/experiments/texts_grid.gin --datasets=debpkgs=SAMPLE --judges=sts13=sts:sts13"
SETTINGS="STS=sickr/dev.tsv,PASSAGE_LENGTH=24,QUERY_LENGTH=24,EVAL_EVERY=0.25,CHECKPOINT_EVERY=10000"
CELL="MINILM/cells/debpkgs-minilm-sde-simcse-seed1"
awk 'NR % 6 == 1' SAMPLE/corpus.jsonl > texts251.jsonl
python -m jaxir.grid $GRID --objectives=simcse --seeds=1 --steps=16 --bindings=$SETTINGS,BATCH_SIZE=64 --output_dir=BATCH64
python -m jaxir.grid $GRID --objectives=simcse --steps=8 --bindings=$SETTINGS,BATCH_SIZE=32,TEXT=texts251.jsonl --output_dir=EPOCH1
python -m jaxir.grid $GRID --objectives=simcse --steps=24 --bindings=$SETTINGS,BATCH_SIZE=32,TEXT=texts251.jsonl --output_dir=EPOCHS3
python -m jaxir.grid $GRID --objectives=simcse,tsdae --steps=32 --bindings=$SETTINGS,BATCH_SIZE=32,TEXT=cacm --output_dir=CACM
python -m jaxir.grid --gin_file=gin/experiments/texts_weights_grid.gin --datasets=debpkgs=SAMPLE --judges=sts13=sts:sts13 --steps=32 \
    --bindings=$SETTINGS,BATCH_SIZE=32 --output_dir=WEIGHTS
python -m jaxir.evaluate --model=$CELL/model --dataset=sts:sickr/test.tsv
python -m jaxir.evaluate --model=$CELL/model --dataset=sts:sts14
python -m jaxir.evaluate --model=$CELL/model --dataset=senteval:TREC_AND_CR

# DiffCSE. Its generator is MiniLM's first two layers with a new head, trained for 120 steps on the same descriptions.
python benchmarks/small_generator.py SAMPLE all-MiniLM-L6-v2 GENERATOR 120
python -m jaxir.grid --gin_file=gin/experiments/texts_grid.gin --datasets=debpkgs=SAMPLE --judges=sts13=sts:sts13 --steps=32 --output_dir=DIFFCSE \
    --objectives=diffcse,diffcse_tanh \
    --bindings=STS=sickr/dev.tsv,PASSAGE_LENGTH=24,QUERY_LENGTH=24,BATCH_SIZE=32,EVAL_EVERY=0.25,CHECKPOINT_EVERY=10000,GENERATOR=hf:GENERATOR

# The hybrid of dense search and BM25. RUN is one of the grid's cells/*/model.
python -m jaxir.index --backend=lucene --corpus=SAMPLE/corpus.jsonl --output=bm25
python -m jaxir.search --index=bm25 --queries=SAMPLE/queries.jsonl --k=1000 --output=bm25.trec
python -m jaxir.encode --model=RUN --input=SAMPLE/corpus.jsonl --output=EMB
python -m jaxir.index --backend=exact --embeddings=EMB --output=dense
python -m jaxir.search --index=dense --queries=SAMPLE/queries.jsonl --k=1000 --output=dense.trec
python -m jaxir.fuse --method=rescore --runs=bm25.trec --embeddings=EMB --queries=SAMPLE/queries.jsonl \
    --sweep=0,1,5,10,20,30,40,50,60,80,100,120 --qrels=SAMPLE/qrels/train.tsv --output=hybrid.trec
python -m jaxir.evaluate --run=BM25=bm25.trec,dense=dense.trec,hybrid=hybrid.trec --qrels=SAMPLE/qrels/test.tsv --metrics="nDCG@10 R@10" --baseline=hybrid

# A longer run, and other judges. To start from random parameters, add --from_scratch=True --learning_rate=3e-4.
python -m jaxir.train --gin_file=gin/experiments/texts.gin --gin_file=gin/models/minilm.gin --gin_file=gin/objectives/simcse.gin \
    --steps=1000 --sharing=sde --data=SAMPLE --sts=sickr/dev.tsv --passage_length=32 --query_length=32 --batch_size=64 \
    --eval_every=0.1 --checkpoint_every=10000 --text=alltexts.jsonl --seed=1 --output_dir=LONG   # FROM_SCRATCH=True, LEARNING_RATE=3e-4
python -m jaxir.evaluate --model=$CELL/model --dataset=senteval:MR_SUBJ_AND_MRPC
python -m jaxir.evaluate --model=st:MINILM32 --dataset=beir:SAMPLE --metrics="nDCG@10 R@10"   # all-MiniLM-L6-v2, max_seq_length 32
python -m jaxir.evaluate --model=st:MINILM32 --dataset=sts:sts13
