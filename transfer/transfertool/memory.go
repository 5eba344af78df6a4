package transfertool

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// checkMemory refuses a region that this machine cannot hold. Go ends the process
// when it gets no memory, and peers would fill what it gets until the kernel does.
// Where the kernel does not tell, nothing is refused.
func checkMemory(n int64) error {
	have, ok := availableMemory()
	if !ok || n <= have {
		return nil
	}
	return fmt.Errorf("serve %.1f GiB: this machine has %.1f GiB of memory available: lower --size",
		float64(n)/(1<<30), float64(have)/(1<<30))
}

// availableMemory returns what Linux estimates that programs can get, in bytes.
func availableMemory() (n int64, ok bool) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, found := strings.CutPrefix(s.Text(), "MemAvailable:"); found {
			if _, err := fmt.Sscanf(rest, "%d kB", &n); err != nil {
				return 0, false
			}
			return n << 10, true
		}
	}
	return 0, false
}
