// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Hosts are network namespaces on one bridge. The driver's own namespace is the host of registry,
// relay and proxies.
//
//	ctl 10.77.0.1 (bridge)   r 10.77.0.2   h1 10.77.0.11   h2 10.77.0.12
const (
	bridgeAddr = "10.77.0.1"
	network    = "10.77.0.0/24,127.0.0.1" // from which parts may be reached
)

var hosts = map[string]string{"r": "10.77.0.2", "h1": "10.77.0.11", "h2": "10.77.0.12"}

func addrOf(host string) string {
	if a := hosts[host]; a != "" {
		return a
	}
	return bridgeAddr
}

// sh runs a command of the machine, for at most ten seconds.
func sh(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

type command []string

func all(commands ...command) error {
	for _, c := range commands {
		if err := sh(c[0], c[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// makeHosts prepares mounts and links. Everything ends with the driver's namespaces.
func makeHosts(dir string) error {
	err := all(
		command{"mount", "--make-rprivate", "/"},
		command{"mount", "-t", "proc", "proc", "/proc"},
		command{"mount", "-t", "tmpfs", "-o", "size=16m", "none", "/run"},
		command{"mount", "-t", "tmpfs", "-o", "size=512m", "none", "/dev/shm"},
		command{"ip", "link", "set", "lo", "up"},
		command{"ip", "link", "add", "br0", "type", "bridge"},
		command{"ip", "addr", "add", bridgeAddr + "/24", "dev", "br0"},
		command{"ip", "link", "set", "br0", "up"},
	)
	if err != nil {
		return err
	}
	for name, addr := range hosts {
		err := all(
			command{"ip", "netns", "add", name},
			command{"ip", "link", "add", "v-" + name, "type", "veth", "peer", "name", "e0", "netns", name},
			command{"ip", "link", "set", "v-" + name, "master", "br0", "up"},
			command{"ip", "-n", name, "addr", "add", addr + "/24", "dev", "e0"},
			command{"ip", "-n", name, "link", "set", "e0", "up"},
			command{"ip", "-n", name, "link", "set", "lo", "up"},
		)
		if err != nil {
			return err
		}
	}
	for _, d := range []string{"disk1", "disk2", "fs2"} {
		at := filepath.Join(dir, d)
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		if err := sh("mount", "-t", "tmpfs", "-o", "size=160m", "none", at); err != nil {
			return err
		}
	}
	return nil
}

// unusedMAC is the address of no interface: frames to it go nowhere.
const unusedMAC = "02:00:00:00:00:99"

// cutLink drops all frames of a host both ways, without an error for either side.
func cutLink(host string, on bool) error {
	state := "up"
	if on {
		state = "down"
	}
	return sh("ip", "link", "set", "v-"+host, state)
}

// halfLink drops what a host sends to the others; what they send arrives.
func halfLink(host string, on bool) error {
	others := []string{bridgeAddr}
	for name, addr := range hosts {
		if name != host {
			others = append(others, addr)
		}
	}
	for _, addr := range others {
		args := []string{"-n", host, "neigh", "del", addr, "dev", "e0"}
		if on {
			args = []string{"-n", host, "neigh", "replace", addr, "lladdr", unusedMAC, "dev", "e0", "nud", "permanent"}
		}
		if err := sh("ip", args...); err != nil {
			return err
		}
	}
	return nil
}

// slowLink gives what goes to a host 2 Mbit/s with a short queue, which also loses packets.
func slowLink(host string, on bool) error {
	if !on {
		return sh("tc", "qdisc", "del", "dev", "v-"+host, "root")
	}
	return sh("tc", "qdisc", "add", "dev", "v-"+host, "root", "tbf", "rate", "2mbit", "burst", "16k", "limit", "60k")
}

// lateLink lets what the other hosts with engines send to a host wait in a deep queue that loses nothing, as in a switch with large buffers:
// at 2 Mbit/s it arrives seconds after the sender has given up. What proxies, registries and tiers send is not in that queue.
func lateLink(host string, on bool) error {
	dev := "v-" + host
	if !on {
		drained := sh("tc", "qdisc", "change", "dev", dev, "parent", "1:3", "handle", "30:", "tbf", "rate", "1gbit", "burst", "1m", "limit", "8m")
		time.Sleep(200 * time.Millisecond) // what waits arrives: removing the queue would lose it
		return errors.Join(drained, sh("tc", "qdisc", "del", "dev", dev, "root"))
	}
	commands := []command{
		{"tc", "qdisc", "add", "dev", dev, "root", "handle", "1:", "htb", "default", "2"},
		{"tc", "class", "add", "dev", dev, "parent", "1:", "classid", "1:2", "htb", "rate", "1gbit"},
		{"tc", "class", "add", "dev", dev, "parent", "1:", "classid", "1:3", "htb", "rate", "1gbit"},
		{"tc", "qdisc", "add", "dev", dev, "parent", "1:3", "handle", "30:", "tbf", "rate", "2mbit", "burst", "16k", "limit", "8m"},
	}
	for _, other := range []string{"h1", "h2"} {
		if other != host {
			commands = append(commands, command{"tc", "filter", "add", "dev", dev, "parent", "1:", "protocol", "ip", "prio", "1", "u32", "match", "ip", "src", addrOf(other) + "/32", "flowid", "1:3"})
		}
	}
	err := all(commands...)
	if err != nil {
		_ = sh("tc", "qdisc", "del", "dev", dev, "root") // what was begun
	}
	return err
}

// resetLinks ends the TCP connections of a host at both ends, as a stateful gateway does that was started again.
func resetLinks(host string) error {
	return sh("nsenter", "--net=/run/netns/"+host, "ss", "-K", "src", addrOf(host))
}

// fill writes a file until the file system is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, n := range []int{1 << 20, 4 << 10} {
		b := make([]byte, n)
		for range 1 << 10 {
			if _, err := f.Write(b); err != nil {
				break
			}
		}
	}
	return nil
}
