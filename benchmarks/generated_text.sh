# The commands of docs/results/generated_text.md.
#
# These are the lines to run, not a script: names in capitals are directories and files of yours,
# which docs/results/generated_text.md describes.

# Questions about documentation: the generator
python -m jaxir.train --gin_file=gin/generator.gin --gin_file=gin/experiments/targets.gin --targets=MIX.jsonl --dev_targets=dev_title.jsonl \
    --model=hf:T5 --passage_length=96 --query_length=32 --batch_size=256 --steps=2500 --learning_rate=1.2e-3 --dropout=0.0 \
    --warmup_steps=300 --dtype=bfloat16 --log_every=50 --eval_every=500 --checkpoint_every=500 --output_dir=MULTI
python -m jaxir.expand generate --model=MULTI --input=titles.jsonl --output=greedy.jsonl --max_new_tokens=24
python -m jaxir.expand generate --model=MULTI --input=titles.jsonl --output=samples.jsonl --num_outputs=10 --temperature=1 --max_new_tokens=24

# Search and choose, for test and for train questions (8 samples for training)
python -m jaxir.index --backend=lucene --corpus=DOCQ/corpus.jsonl --output=bm25
python -m jaxir.search --index=bm25 --queries=test.jsonl --k=100 --output=bm25.trec
python -m jaxir.expand retrieve --index=bm25 --queries=test.jsonl --expansions=samples.jsonl --answers=DOCQ/answers.jsonl --answers_in=document \
    --output=candidates.jsonl
python -m jaxir.expand choose --queries=test.jsonl --expansions=greedy.jsonl --output=gar.jsonl
python -m jaxir.expand choose --candidates=candidates.jsonl --by=concat --output=concat.jsonl
python -m jaxir.expand choose --candidates=candidates.jsonl --output=first.jsonl
python -m jaxir.expand choose --candidates=candidates.jsonl --by=oracle --num_candidates=10 --output=oracle.jsonl
python -m jaxir.fuse --runs=bm25.trec,ri.trec --method=rrf --output=fused.trec

# The rerankers of queries
python -m jaxir.train --gin_file=gin/ear_ri.gin --train_candidates=train_candidates.jsonl --candidates=8 --batch_size=16 --steps=300 \
    --learning_rate=5e-5 --warmup_steps=30 --query_length=48 --seed=1 --output_dir=RI
python -m jaxir.train --gin_file=gin/ear_rd.gin --train_candidates=train_candidates.jsonl --candidates=8 --batch_size=16 --steps=300 \
    --learning_rate=5e-5 --warmup_steps=30 --query_length=48 --corpus=DOCQ/corpus.jsonl --passage_length=64 --seed=1 --output_dir=RD
python -m jaxir.expand rerank --model=RI --candidates=candidates.jsonl --output=ri.jsonl
python -m jaxir.expand rerank --model=RD --candidates=candidates.jsonl --corpus=DOCQ/corpus.jsonl --output=rd.jsonl
python -m jaxir.evaluate --run=BM25=bm25.trec,first=first.trec,RI=ri_1.trec+ri_7.trec+ri_42.trec,RD=rd_1.trec+rd_7.trec+rd_42.trec,oracle=oracle.trec \
    --baseline=BM25 --answers=test_gold.jsonl --answers_in=document --corpus=DOCQ/corpus.jsonl --metrics="Success@1 Success@5 Success@20 RR"

# Three generators
python -m jaxir.expand generate --model=MULTI --input=answers.jsonl --output=answer.jsonl --max_new_tokens=24
python -m jaxir.expand choose --queries=test.jsonl --expansions=answer.jsonl --output=gar_answer.jsonl
python -m jaxir.search --index=bm25 --queries=gar_answer.jsonl --k=100 --output=gar_answer.trec
python -m jaxir.fuse --runs=gar_sentence.trec,gar_answer.trec,gar_title.trec --method=round_robin --depth=100 --output=fused.trec

# Questions about documentation: passages reranked
python -m jaxir.mine --run=train.trec --dataset=beir:DOCQ --negatives=10 --output=NEG
python -m jaxir.train --gin_file=gin/reranker.gin --data=DOCQ --mined=NEG/train.jsonl --batch_size=16 --negatives=7 --steps=500 \
    --learning_rate=5e-5 --warmup_steps=50 --query_length=40 --passage_length=88 --seed=1 --output_dir=PR
python -m jaxir.rerank --model=PR --run=ri.trec --dataset=beir:DOCQ --depth=5 --keep_rest --output=ri_pr.trec

# Questions about documentation: a reader
python -m jaxir.train --gin_file=gin/reader.gin --data=BOTH --run=read_train.trec --answers=BOTH/answers.jsonl --model=MULTI \
    --passages=3 --passage_length=96 --query_length=16 --remat=False --dtype=bfloat16 --batch_size=64 --steps=3000 \
    --learning_rate=1e-3 --warmup_steps=100 --eval_every=3000 --checkpoint_every=3000 --seed=1 --output_dir=READER
python -m jaxir.read --model=READER --run=ri.trec --queries=BOTH/queries.jsonl --corpus=BOTH/corpus.jsonl --passages=3 --passage_length=96 \
    --max_new_tokens=12 --dtype=bfloat16 --output=read_ri.jsonl
python -m jaxir.evaluate --predictions=BM25=read_bm25.jsonl,GAR=read_gar.jsonl,RI=read_ri.jsonl,RD=read_rd.jsonl --baseline=BM25 --answers=test_gold.jsonl

# XQuAD
python benchmarks/xquad_sentences.py xquad_en XQ
python benchmarks/small_t5.py XQ T5 4000
python -m jaxir.train --gin_file=gin/generator.gin --gin_file=gin/experiments/targets.gin --targets=XQ/targets.jsonl --model=hf:T5 \
    --passage_length=48 --query_length=64 --batch_size=32 --steps=1200 --learning_rate=2e-3 --dropout=0.0 --warmup_steps=100 \
    --checkpoint_every=200 --output_dir=GEN
python -m jaxir.expand generate --model=GEN --input=XQ/test.jsonl --output=greedy.jsonl --max_new_tokens=48   # of answers and titles 16
# To generate answers, use --targets=XQ/targets/answers.jsonl --query_length=16; to generate titles, titles.jsonl and --steps=2400
python -m jaxir.expand generate --model=GEN --input=XQ/test.jsonl --output=samples.jsonl --num_outputs=8 --temperature=1 --max_new_tokens=48
python -m jaxir.index --backend=lucene --corpus=XQ/corpus.jsonl --output=bm25
python -m jaxir.expand retrieve --index=bm25 --queries=XQ/test.jsonl --expansions=samples.jsonl --answers=XQ/answers.jsonl --output=candidates.jsonl
python -m jaxir.train --gin_file=gin/ear_ri.gin --train_candidates=train_candidates.jsonl --candidates=8 --batch_size=8 --steps=60 \
    --learning_rate=1e-4 --warmup_steps=6 --query_length=64 --seed=1 --output_dir=RI
python -m jaxir.train --gin_file=gin/ear_rd.gin --train_candidates=train_candidates.jsonl --candidates=8 --batch_size=8 --steps=60 \
    --learning_rate=1e-4 --warmup_steps=6 --query_length=64 --corpus=XQ/corpus.jsonl --passage_length=40 --seed=1 --output_dir=RD
python -m jaxir.expand rerank --model=RD --candidates=candidates.jsonl --corpus=XQ/corpus.jsonl --output=rd.jsonl
python -m jaxir.fuse --runs=ri_sentence.trec,ri_answer.trec,ri_title.trec --method=round_robin --depth=100 --output=three.trec   # of each seed
python -m jaxir.evaluate --run=BM25=bm25.trec,GAR=gar.trec,concat=concat.trec,first=first.trec,RI=ri_1.trec+ri_7.trec+ri_42.trec,oracle=oracle.trec \
    --baseline=BM25 --answers=test_gold.jsonl --corpus=XQ/corpus.jsonl --metrics="Success@1 Success@5 Success@20 RR"

# A reader that looks
python benchmarks/reading_defaults.py DOCQ DEFAULTS
python benchmarks/small_t5.py DOCQ T5 5000 192 2
python -m jaxir.train --gin_file=gin/generator.gin --gin_file=gin/experiments/targets.gin --targets=DEFAULTS/targets.jsonl \
    --dev_targets=DEFAULTS/dev_targets.jsonl --model=hf:T5 --passage_length=64 --query_length=10 --batch_size=64 --steps=5000 \
    --learning_rate=1.5e-3 --dropout=0.0 --warmup_steps=200 --checkpoint_every=500 --eval_every=500 --output_dir=LOOKS
python -m jaxir.index --backend=lucene --corpus=DEFAULTS/corpus.jsonl --output=defaults
python -m jaxir.search --index=defaults --queries=DEFAULTS/train.jsonl --k=3 --output=train.trec   # dev.jsonl and test.jsonl alike
python -m jaxir.train --gin_file=gin/reader.gin --gin_file=gin/evaluators/reading.gin --data=DEFAULTS --run=train.trec \
    --answers=DEFAULTS/answers.jsonl --dev_run=dev.trec --dev_split=dev --model=LOOKS --passages=2 --passage_length=80 \
    --query_length=8 --remat=False --batch_size=32 --steps=1000 --learning_rate=1e-3 --warmup_steps=100 --dropout=0.0 \
    --dev_new_tokens=8 --eval_every=250 --checkpoint_every=250 --seed=1 --output_dir=READER
python -m jaxir.read --model=READER --run=test.trec --queries=DEFAULTS/test.jsonl --corpus=DEFAULTS/corpus.jsonl --passages=2 --max_new_tokens=8 \
    --output=read_bm25.jsonl
python -m jaxir.evaluate --predictions=other=read_other.jsonl,BM25=read_bm25.jsonl,own=read_own.jsonl --baseline=other --answers=test_gold.jsonl

# A reader that looks: GAR and EAR
python -m jaxir.train --gin_file=gin/generator.gin --gin_file=gin/experiments/targets.gin --targets=targets.jsonl --model=hf:T5 \
    --passage_length=40 --query_length=10 --batch_size=32 --steps=300 --learning_rate=1.5e-3 --dropout=0.0 --warmup_steps=60 \
    --output_dir=GEN
python -m jaxir.expand generate --model=GEN --input=DEFAULTS/test.jsonl --output=samples.jsonl --num_outputs=8 --temperature=1 --max_new_tokens=8
python -m jaxir.train --gin_file=gin/ear_ri.gin --train_candidates=train_candidates.jsonl --candidates=8 --batch_size=8 --steps=60 \
    --learning_rate=1e-4 --warmup_steps=6 --query_length=48 --seed=1 --output_dir=RI
python -m jaxir.read --model=READER --run=ri.trec --queries=DEFAULTS/test.jsonl --corpus=DEFAULTS/corpus.jsonl --passages=2 --max_new_tokens=8 \
    --output=read_ri.jsonl

# Curriculum sampling
python -m jaxir.train --gin_file=gin/generator.gin --gin_file=gin/experiments/targets.gin --targets=pairs.jsonl --dev_targets=pairs_dev.jsonl \
    --model=hf:T5 --passage_length=64 --query_length=24 --batch_size=32 --steps=1200 --learning_rate=2e-3 --dropout=0.0 \
    --warmup_steps=60 --eval_every=400 --checkpoint_every=400 --output_dir=SYNOPSES
python -m jaxir.expand generate --model=SYNOPSES --input=texts.jsonl --output=queries.jsonl --num_outputs=10 --top_k=10 --max_new_tokens=24

# Curriculum sampling: repeat this with --selection=curriculum, random, gold, top and bottom
python -m jaxir.train --gin_file=gin/curriculum.gin --selection=curriculum --expansions=queries.jsonl --data=SAMPLE --dev_split=None \
    --passage_length=48 --query_length=24 --batch_size=32 --steps=60 --learning_rate=5e-5 --seed=1 --output_dir=RUN
python -m jaxir.encode --model=RUN --input=SAMPLE/corpus.jsonl --expansions=queries.jsonl --views=3 --output=EMB
python -m jaxir.index --backend=exact --embeddings=EMB --output=INDEX
python -m jaxir.search --index=INDEX --queries=SAMPLE/queries.jsonl --k=100 --output=curriculum.trec
python -m jaxir.evaluate --run=curriculum=curriculum.trec,random=random.trec,gold=gold.trec --baseline=curriculum --qrels=SAMPLE/qrels/test.tsv \
    --metrics="nDCG@10 RR@10 R@10"
