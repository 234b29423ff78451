"""Launch scripts are followed as bash follows them, and nothing is run."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.engines.launch.shell import read_script
from meshwright.engines.launch.shell_values import options_of
from meshwright.schema import ConfigError

SCRIPTS = {
    "arrays": """
        TP=4; PP=${PP:-2}
        ARGS=(
            --tensor-model-parallel-size $TP   # a comment
            --pipeline-model-parallel-size "$PP"
            # --context-parallel-size 2
            --note "two words"
        )
        ARGS+=(--bf16 "--fp8-format hybrid")
        torchrun ${ARGS[@]} "${ARGS[@]}" ${#ARGS[@]} ${ARGS[1]}
    """,
    "strings over lines": """
        GBS=512
        OPTS=" \\
            --lr 1e-4 \\
            --global-batch-size $GBS \\
            "
        export ALL="--bf16 \\
            $OPTS --pp-method 'type:a|b'"
        torchrun --nnodes 2 $ALL \\
            --last
    """,
    "arithmetic": """
        NODES=4 GPUS=8
        WORLD=$((NODES * GPUS)); HALF=$(( $WORLD / 2 - 1 ))
        torchrun --a $WORLD --b $HALF --c $(( (WORLD+1) % 4 )) --d=$((${NODES}*2))
    """,
    "conditions": """
        KIND=fp8; N=16
        if [[ "$KIND" == "fp8" ]]; then A=(--fp8); elif [ $N -gt 8 ]; then A=(--no); else A=(--never); fi
        if [ -z "$UNSET" ] && [ "$N" -ge 16 ]; then A+=(--unset); fi
        [ -n "$UNSET" ] && A+=(--wrong)
        [[ $KIND == fp* || $N -eq 3 ]] && A+=(--glob)
        case $KIND in
            bf16|fp16) B="--half" ;;
            fp*) B="--eight" ;;
            *) B="--other" ;;
        esac
        ((N > 10)) && B="$B --ten"
        [ ! -z "$N" ] || B=
        torchrun "${A[@]}" $B
    """,
    "functions and groups": """
        launch() {
            local extra=$2
            torchrun --size $1 $extra "${@:-x}" --end
        }
        { X=1; }
        true && X=2 || X=3
        false || Y=5
        launch 8 --bf16
        function other { torchrun --other $X$Y; }
        other
    """,
    "quotes": r"""
        A='single $A "inside"' B="double \"quoted\" \$A $X"
        C=a\ b
        D=$'c d'
        torchrun "$A" "$B" "$C" "$D" e"f"'g' "" --x="1 2" --y=$C plain$UNSET "$@"
    """,
    "parameters": """
        NAME=llama3_8b.yaml
        torchrun ${NAME%.yaml} ${NAME%%_*} ${NAME#*_} ${NAME##*.} ${NAME^^} ${MISSING-none} ${NAME:+set} ${MISSING:+set} \\
            ${MISSING:=later} $MISSING
        EMPTY=
        torchrun a ${EMPTY:-b} ${EMPTY-c} d
    """,
    "loops": """
        for size in 4; do ARGS="$ARGS --size $size"; done
        while false; do ARGS=wrong; done
        until true; do ARGS=wrong; done
        torchrun $ARGS 2>&1 | tee /dev/null
        torchrun --second > /dev/stdout < /dev/null
    """,
}


def as_bash_runs(script: str) -> list[list[str]]:
    """The words of every torchrun, with bash itself."""
    shown = 'torchrun() { printf "%s\\0" "$@" >&3; printf "\\n\\0" >&3; }\n' + script
    read, write = os.pipe()
    environment = {"PATH": "/usr/bin:/bin"}
    subprocess.run(
        ["bash", "-c", f"exec 3>&{write}\n{shown}"],
        pass_fds=[write],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    os.close(write)
    with os.fdopen(read) as file:
        words = file.read().split("\0")[:-1]
    calls: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_passes(name: str) -> None:
    found = read_script(SCRIPTS[name], Path("launch.sh"))
    calls = [[word.text.replace("$UNSET", "").replace("$X", "") if word.unknown else word.text for word in each.words[1:]]
             for each in found.commands if each.words[0].text == "torchrun"]  # fmt: skip
    assert calls == as_bash_runs(SCRIPTS[name])


def test_a_value_knows_its_line_and_its_variable() -> None:
    text = (
        'TP=8\nARGS="\n  --tensor-model-parallel-size $TP \\\n  --seq-length 4096"\ntorchrun $ARGS --nnodes $NNODES\n'
    )
    (command,) = read_script(text, Path("run.sh")).commands
    found = {name: values[0] for _, name, values in options_of(command.words)}
    assert (str(found["tensor-model-parallel-size"].place), found["tensor-model-parallel-size"].variable) == (
        "run.sh:1",
        "TP",
    )
    assert str(found["seq-length"].place) == "run.sh:4"
    assert found["nnodes"].unknown == "$NNODES"


def test_what_the_user_gives_wins() -> None:
    (command,) = read_script("N=2\ntorchrun --n $N --m $M", Path("run.sh"), {"N": "8", "M": "3"}).commands
    assert [word.text for word in command.words] == ["torchrun", "--n", "8", "--m", "3"]


def test_slurm_and_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text("TP=2\n")
    text = (
        "#!/bin/bash\n#SBATCH --nodes=16\n#SBATCH --gres=gpu:8\nsource ./common.sh\nsource $HOME/other.sh\n"
        'CONFIG="ds.$SLURM_JOB_ID.json"\ncat <<EOT > $CONFIG\n{"stage": $TP}\nEOT\n'
        "cat > plain.txt <<'EOT'\n$TP\nEOT\n"
        'srun bash -c "torchrun --nnodes $SLURM_NNODES --rank \\$SLURM_PROCID --tp $TP"\n'
    )
    found = read_script(text, tmp_path / "job.slurm")
    assert found.slurm["nodes"][0] == 16 and found.slurm["gpus-per-node"][0] == 8
    assert found.files["ds.$SLURM_JOB_ID.json"][0] == '{"stage": 2}\n'
    assert found.files["plain.txt"][0] == "$TP\n"
    words = [word.text for word in found.commands[-1].words]
    assert words[words.index("--nnodes") + 1] == "16" and words[words.index("--tp") + 1] == "2"
    assert any("other.sh, which is not here" in line for line in found.undecided)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    read_script(
        f"A=$(touch {mark}); B=`touch {mark}`; touch {mark}; eval touch {mark}; cat <(touch {mark})", Path("x.sh")
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('A="open', 'line 1: this " is not closed'),
        ("\nARGS=( --a", "line 2: the array ARGS"),
        ("if true; then\n torchrun", "line 1"),
        ("A=x\n" + 'A="$A$A$A$A"\n' * 30, "grow"),
        ("f() { f; }\nf", "without end"),
    ],
)
def test_a_broken_script_is_refused_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_script(text, Path("x.sh"))


@given(st.text(alphabet="$(){}[]\"'`\\|&;<>#=+ \nabAB1-if then fi do done case esac", max_size=120))
@settings(max_examples=300, deadline=None)
def test_any_text_is_followed_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_script(text, Path("x.sh"))


WORDS = (
    "A=(", "A+=(", "(", ")", "<", "<<EOF", ">", ";;", ";", "&", "||", "|", "\n", " ", "if ", "then ", "fi ", "for a in ", "do ",
    "done ", "case a in ", "esac ", "{ ", "}", "[[ ", "]]", "$(", "${", '"', "'", "\\", "`", "a", "b=1 ", "# c", "EOF", "()", "<(",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=16))
def test_any_words_are_followed_to_their_end_or_refused(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        read_script("".join(words), Path("x.sh"))


@pytest.mark.parametrize("mark", ["<", ">", "<(", "&>"])
def test_what_is_no_part_of_a_word_ends_the_words_of_a_loop(mark: str) -> None:
    with pytest.raises(ConfigError, match="no 'do'"):
        read_script(f"for a in b {mark} c; do torchrun x.py; done\n", Path("x.sh"))


def test_what_is_no_part_of_a_word_is_passed_over_in_an_array() -> None:
    assert read_script("A=(--tp ;; 4 < 5)\ntorchrun ${A[@]}\n", Path("x.sh"))
