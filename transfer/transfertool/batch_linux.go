package transfertool

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// scheduleBatch makes every thread of the process, and those that they start,
// SCHED_BATCH: the kernel then does not interrupt a running process when one of
// them is woken. Threads with a policy other than the default keep it.
func scheduleBatch() error {
	for changed := true; changed; { // a thread not yet changed may start others
		changed = false
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("list threads: %w", err)
		}
		for _, t := range tasks {
			id, err := strconv.Atoi(t.Name())
			if err != nil {
				return fmt.Errorf("list threads: %w", err)
			}
			attr, err := unix.SchedGetAttr(id, 0)
			if err == unix.ESRCH { // it has ended
				continue
			}
			if err != nil {
				return fmt.Errorf("sched_getattr: %w", err)
			}
			if attr.Policy != unix.SCHED_NORMAL {
				continue
			}
			attr.Policy = unix.SCHED_BATCH
			if err := unix.SchedSetAttr(id, attr, 0); err != nil && err != unix.ESRCH {
				return fmt.Errorf("sched_setattr: %w", err)
			}
			changed = true
		}
	}
	return nil
}
