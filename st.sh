a=$(head -1 /proc/stat); timeout 30 /tmp/perf-exp/exp0 bf16 15 off,off2,k8v8,k4v4,scores; echo $a; head -1 /proc/stat; top -b -n 1 | head -12 | tail -6
