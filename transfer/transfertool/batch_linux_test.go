package transfertool

import (
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Threads that exist and threads that come later are all SCHED_BATCH.
func TestScheduleBatch(t *testing.T) {
	if err := scheduleBatch(); err != nil {
		t.Fatal(err)
	}
	var ready, end sync.WaitGroup
	stop := make(chan struct{})
	for range 4 { // threads of their own
		ready.Add(1)
		end.Go(func() {
			runtime.LockOSThread()
			ready.Done()
			<-stop
		})
	}
	ready.Wait()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, task := range tasks {
		id, err := strconv.Atoi(task.Name())
		if err != nil {
			t.Fatal(err)
		}
		attr, err := unix.SchedGetAttr(id, 0)
		if err == unix.ESRCH {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		n++
		if attr.Policy != unix.SCHED_BATCH {
			t.Errorf("thread %d has policy %d", id, attr.Policy)
		}
	}
	close(stop)
	end.Wait()
	if n < 5 {
		t.Errorf("%d threads", n)
	}
}
