// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"
)

// linuxOnly are the commands that need Linux. The others need no shared memory, and run on other systems, too.
var linuxOnly = []string{"all", "server", "relay", "store-node", "keeper", "engine", "demo", "pool", "doctor"}

// refuseElsewhere returns an error if a command, such as "transfer serve", does not run on the operating system goos.
func refuseElsewhere(goos, command string) error {
	name, _, _ := strings.Cut(command, " ")
	if goos == "linux" || !slices.Contains(linuxOnly, name) {
		return nil
	}
	return fmt.Errorf("kvasir %s needs Linux: it shares memory with other processes in /dev/shm, or looks into them. On %s run sim, bench, coordinator, proxy, bootstrap, "+
		"and the commands that ask a server (status, top, explain, advise, quota, clear)", name, goos)
}
