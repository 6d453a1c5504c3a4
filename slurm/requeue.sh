#!/bin/bash
# The end of a job: requeue.sh STATUS puts it back into the queue if its run was told to stop and
# has saved (75), or met the SIGUSR1 before there was anything to save (138); and passes the status
# on.

status=$1
job=$SLURM_JOB_ID
# An array's own number is also that of its last task, and stands for all of them.
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
# Not where somebody has cancelled it, or the controller is requeueing it by itself.
if [[ $status = 75 || $status = 138 ]] && [ "$(squeue --noheader --format=%T --jobs="$job")" = RUNNING ]; then
    echo "job $job is put back into the queue"
    scontrol requeue "$job"
fi
exit "$status"
