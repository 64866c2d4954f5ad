#!/bin/bash
# Runs a command again until it ends for good:
#
#     supervise.sh srun ... iaj ...
#
# 0, 2, 3, 4, 7, 10, 11   finished, or another start would end alike (docs/reference/errors.md): passed on
# 75                      stopped on request with its state saved: the job is queued again, to resume
# any other               a process was killed, a node lost, a disk full: all start again, after
#                         PAUSE seconds, then twice as many, at most RETRIES times in a row
#
# A start that lasted CALM seconds begins a new row. SIGTERM and SIGUSR1 are passed on, so that
# `#SBATCH --signal=B:USR1@600`, which reaches this script alone, stops the command too. Both as
# SIGUSR1, which `iaj` takes alike: srun forwards it to its tasks, and kills them at a SIGTERM.
set -u
failures=0 signals=0 child=''
pass_on() { ((!signals)) || [[ -z $child ]] || kill -USR1 "$child"; }
trap '((++signals)); pass_on' TERM USR1
while true; do
    SECONDS=0
    "$@" &
    child=$!
    pass_on
    # A signal ends `wait`, not the command.
    while before=$signals; wait "$child"; code=$?; ((signals > before)); do :; done
    child=''
    case $code in
        0 | 2 | 3 | 4 | 7 | 10 | 11) exit "$code" ;;
    esac
    # After a signal nothing is started again, however the command ended: the time is up.
    if ((code == 75 || signals)); then
        # A job that was cancelled is no longer running, and stays cancelled.
        if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        exit 75
    fi
    ((SECONDS < ${CALM:-3600})) || failures=0
    ((++failures <= ${RETRIES:-5})) || exit "$code"
    pause=$((${PAUSE:-15} * 2 ** (failures - 1)))
    echo "supervise: exit code $code, start $failures of ${RETRIES:-5} again in $pause s" >&2
    sleep "$pause"
done
