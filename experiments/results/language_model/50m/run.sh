#!/usr/bin/env bash
# The trainings of this comparison, their evaluation, and the table: run.sh DATA RUNS [LANES], from the checkout's root.
#
# DATA has the token files {book,web_docs,wikipedia}.{train,val}.u16.xz, tokenizer.model.v1, and the rows of the tasks,
# lambada_openai.jsonl and wikitext2_raw_test.jsonl. RUNS gets a folder a training; called again, it goes on with what is
# not done. The variable FLAGS may have more flags of train. LANES trainings share the device: two finish sooner than
# one after the other, as one computes while the other compiles or is evaluated.
set -euo pipefail
export DATA=$1 RUNS=$2 LANES=${3:-1}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-$(python3 -c "print(0.86 / $LANES)")}
mkdir -p "$RUNS"

one() {
    local layer=$1 lr=$2 seed=$3 run=$RUNS/$1-$2-$3
    local train=("$DATA"/{book,web_docs,wikipedia}.train.u16.xz) val=("$DATA"/{book,web_docs,wikipedia}.val.u16.xz)
    local command="python3 -m experiments.language_model"
    [ -e "$run/eval.json" ] && return
    if [ -e "$run/config.json" ]; then
        $command train --resume "$run"
    else
        $command train --preset 50m --layer "$layer" --lr "$lr" --lr-end "$(python3 -c "print($lr / 10)")" --seed "$seed" \
            --data "${train[@]}" --validation "${val[@]}" --tokenizer "$DATA/tokenizer.model.v1" --out "$run" ${FLAGS:-}
    fi >"$run.log" 2>&1 || { echo "$run: training failed, see $run.log"; return 1; }
    $command eval "$run" --tasks wikitext lambada_openai --rows "$DATA" --batch-size 32 --out "$run/eval.json" \
        >>"$run.log" 2>&1 || { echo "$run: evaluation failed, see $run.log"; return 1; }
    echo "$run: done"
}
export -f one

{
    for layer in gated-efla gated-deltanet efla deltanet transformer mamba2; do echo "$layer 3e-3 42"; done
    echo transformer 1e-3 42
    for layer in efla deltanet; do echo "$layer 3e-3 43"; done
    for layer in gated-efla gated-deltanet efla deltanet mamba2; do echo "$layer 1e-3 42"; done
} | xargs -P "$LANES" -L 1 bash -c 'one "$@"' one
python3 -m experiments.language_model compare "$RUNS"/*-*e-*-*/ --out "$RUNS/comparison-$(date +%Y%m%d-%H%M%S)"
