// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"
)

// linuxOnly are the commands that need Linux. The others run elsewhere, too: they need no shared memory.
var linuxOnly = []string{"all", "server", "relay", "store-node", "keeper", "engine", "demo", "pool", "doctor"}

// refuseElsewhere says why a command, "transfer serve" or the like, does not run on an operating system.
func refuseElsewhere(goos, command string) error {
	name, _, _ := strings.Cut(command, " ")
	if goos == "linux" || !slices.Contains(linuxOnly, name) {
		return nil
	}
	return fmt.Errorf("kvasir %s needs Linux: it shares memory with other processes in /dev/shm, or looks into them. On %s run sim, bench, coordinator, proxy, bootstrap, "+
		"and the commands that ask a server (status, top, explain, advise, quota, clear)", name, goos)
}
