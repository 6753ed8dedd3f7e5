# Sums the output of `ctest --verbose` to one line "N passed, N failed, N skipped" and exits with 1 on any failure.
# A GoogleTest binary and pytest count test by test, every other test counts as one. What was announced and gave no result, as
# after a crash, counts as failed. -v status=N hands in ctest's own exit code. What a failed GoogleTest test printed stands
# once more before the sum: a log is often cut from its start.

function finish(number, verdict,   counted) {
  counted = ok[number] + bad[number] + left_out[number]
  if (number in announced) {
    if (counted < announced[number]) bad[number] += announced[number] - counted
    if (verdict == "failed" && !bad[number]) bad[number] = 1
    if (!announced[number] && verdict == "passed") bad[number] = 1  # a test binary without tests tests nothing
  } else {
    ok[number] = verdict == "passed"
    bad[number] = verdict == "failed"
    left_out[number] = verdict == "skipped"
  }
  passed += ok[number]; failed += bad[number]; skipped += left_out[number]
  if (bad[number]) failures = failures sprintf("failed: %s (%d)\n", name[number], bad[number])
}

# "    Start 3: gpu", and what that test prints: "3: [       OK ] Suite.name (0 ms)".
/^ +Start +[0-9]+: / { number = $2 + 0; name[number] = $3; started++ }
/^[0-9]+: \[==========\] Running [0-9]+ tests? from / { announced[$1 + 0] = $4 }
/^[0-9]+: \[ RUN      \] / { output[$1 + 0] = ""; lines[$1 + 0] = 0 }
/^[0-9]+: / && ++lines[$1 + 0] <= 40 { output[$1 + 0] = output[$1 + 0] $0 "\n" }
/^[0-9]+: .*\[       OK \] .*\([0-9]+ ms\)$/ { ok[$1 + 0]++ }
/^[0-9]+: .*\[  FAILED  \] .*\([0-9]+ ms\)$/ { bad[$1 + 0]++; failures = failures output[$1 + 0] }
/^[0-9]+: .*\[  SKIPPED \] .*\([0-9]+ ms\)$/ { left_out[$1 + 0]++ }

# pytest's last line: "4: 1 failed, 35 passed, 3 skipped in 0.31s".
/^[0-9]+: ([0-9]+ [a-z]+, )*[0-9]+ [a-z]+ in [0-9.]+s/ {
  for (field = 2; $field != "in"; field += 2) {
    announced[$1 + 0] += $field
    if ($(field + 1) ~ /^passed/) ok[$1 + 0] += $field
    else if ($(field + 1) ~ /^skipped/) left_out[$1 + 0] += $field
    else bad[$1 + 0] += $field
  }
}

# "3/5 Test #3: gpu ....   Passed    0.50 sec": anything but passed or skipped is a failure.
/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
  match($0, /#[0-9]+/)
  finished++
  finish(substr($0, RSTART + 1, RLENGTH - 1) + 0,
         /   Passed +[0-9.]+ sec/ ? "passed" : (/\*\*\*Skipped/ ? "skipped" : "failed"))
}

END {
  if (finished < started) { failed += started - finished; failures = failures "failed: ctest ended early\n" }
  if (!finished) { failed++; failures = failures "failed: no test ran\n" }
  if (status != 0 && !failed) { failed = 1; failures = failures sprintf("failed: ctest ended with %d\n", status) }
  printf "%s%d passed, %d failed, %d skipped\n", failures, passed, failed, skipped
  exit failed > 0
}
