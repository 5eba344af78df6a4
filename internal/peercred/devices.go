// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// devices are the prefixes of the device files that a process maps when it uses an accelerator: GPUs of NVIDIA, AMD and Intel, and
// others.
var devices = []string{"/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg", "/dev/accel", "/dev/davinci", "/dev/neuron", "/dev/hl"}

// UsesDevice reports whether the process pid maps the device file of an accelerator, which can copy to and from memory on its own. seen
// is false if this process cannot read the mappings.
func UsesDevice(pid int) (uses, seen bool) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return false, false
	}
	defer f.Close()
	return namesDevice(f)
}

// namesDevice reports whether the text of /proc/PID/maps names an accelerator's device file. whole is false if it could not be read to
// its end.
func namesDevice(maps io.Reader) (uses, whole bool) {
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		_, path, ok := strings.Cut(lines.Text(), " /dev/")
		for _, d := range devices {
			if ok && strings.HasPrefix("/dev/"+path, d) {
				return true, true
			}
		}
	}
	return false, lines.Err() == nil
}

const perSecond = 100 // clock ticks; the same in /proc on every architecture

// Ticks returns the current time on the clock of Process.Started; 0: unknown.
func Ticks() uint64 {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return 0
	}
	return uint64(now.Nano()) / uint64(time.Second/perSecond)
}
