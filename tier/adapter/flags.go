// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// Flags are the flags about tiers, for each command that has tiers.
type Flags struct {
	Disk       []string `name:"disk" sep:"none" help:"A directory on a local disk, made when it is missing, that keeps chunks below the pool over restarts and power cuts. Repeat it for more disks." group:"Tiers" placeholder:"PATH"`
	DiskGB     float64  `name:"disk-gb" help:"GiB that each --disk may take, never more." group:"Tiers" placeholder:"GIB"`
	DiskFree   float64  `name:"disk-min-free-gb" help:"GiB of each file system that are left to others; 0 for a twentieth of it, at most 4." default:"0" group:"Tiers"`
	DiskWrites float64  `name:"disk-write-gb-per-day" help:"GiB that may be written to each --disk in a day, for its wear; 0 for no limit." default:"0" group:"Tiers"`
	DiskAll    bool     `name:"disk-first-touch" help:"Write every chunk to disk. By default chunks are written at once while the disk has room or that gives more hits, else when they were asked for again." group:"Tiers"`
	DiskAgain  bool     `name:"disk-second-touch" help:"Write only chunks to disk that were asked for again: the least wear." group:"Tiers"`

	KeyFile    KeyFile `name:"tier-key-file" help:"File of keys, 32 bytes a line (openssl rand -hex 32), that encrypt --disk, redis and s3_native at rest: the first one encrypts, all of them decrypt. It is read again when it changes. Also KVASIR_TIER_KEYS, the keys themselves." group:"Tiers" placeholder:"FILE"`
	KeyCommand Command `name:"tier-key-command" help:"Shell command that prints the keys instead, as from a key management service: run at the start, every hour, and by kvasir tier rekey. It has 10 s." group:"Tiers" placeholder:"COMMAND"`

	L2      []Text  `name:"l2-adapter" sep:"none" help:"A tier below the pool, as JSON with LMCache's keys: {\"type\":\"fs\",\"base_path\":\"/data/kv\"}, fs_native, redis, resp, valkey, s3, s3_native or mooncake_store. LMCache servers may share all but redis and s3_native. Repeat it for more tiers: the first is asked first, after the disks." group:"Tiers" placeholder:"JSON"`
	Trust   string  `name:"l2-trust" help:"What of an --l2-adapter is served. length: what has the right length, and the right checksum where it has one (LMCache writes none); checksum: only what has a checksum." default:"length" enum:"length,checksum" group:"Tiers"`
	Timeout float64 `name:"l2-prefetch-load-timeout" help:"Seconds that a lookup waits for tiers. Its answer is what has arrived by then; what arrives later stays in the pool." default:"2" group:"Tiers"`
	Faster  bool    `name:"l2-load-if-faster" help:"Leave tiers out while engines compute chunks faster than tiers give them; kvasir status shows both rates." group:"Tiers"`
	Warm    float64 `name:"warm" help:"GiB that a server reads from its tiers after its start, what is the hottest there first, in the background and into free memory; 0 for none. redis and s3_native know what is hot." default:"0" group:"Tiers" placeholder:"GIB"`
	WarmFor float64 `name:"warm-seconds" help:"Seconds that --warm may take." default:"300" group:"Tiers"`
	Write   string  `name:"l2-write" help:"When chunks are written to tiers: commit (soon after they are stored), hit (once an engine has loaded them) or never." default:"commit" enum:"commit,hit,never" group:"Tiers"`
	Answers string  `name:"l2-write-answers" help:"When chunks with generated tokens are written to tiers: yes (as --l2-write says), hit (once a lookup found them in the pool) or no (never)." default:"hit" enum:"yes,hit,no" group:"Tiers"`
}

// KeyFile is the path of a file of keys. A flag with an empty path is an error: the operator wants encryption, perhaps with a variable that
// is not set.
type KeyFile string

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *KeyFile) UnmarshalText(text []byte) error {
	*f = KeyFile(text)
	return unlessEmpty(text)
}

func unlessEmpty(text []byte) error {
	if len(bytes.TrimSpace(text)) == 0 {
		return errors.New("it is empty: leave it out where tiers are not to be encrypted")
	}
	return nil
}

// Command is a shell command that may contain a secret. Its String hides the command. An empty one is an error, as for KeyFile.
type Command string

// UnmarshalText implements encoding.TextUnmarshaler.
func (c *Command) UnmarshalText(text []byte) error {
	*c = Command(text)
	return unlessEmpty(text)
}

func (c Command) String() string {
	if c == "" {
		return ""
	}
	return "(set)"
}

// MarshalYAML returns the text for a file of flags, without the command.
func (c Command) MarshalYAML() (any, error) { return c.String(), nil }

const gib = 1 << 30

// KeysVariable is the environment variable with the keys of tiers, separated by commas.
const KeysVariable = "KVASIR_TIER_KEYS"

// EnvironmentKeys returns the text of KeysVariable. If that is set and empty, it returns a text without a key, which is an error later.
func EnvironmentKeys() string {
	text, set := os.LookupEnv(KeysVariable)
	if set && strings.TrimSpace(text) == "" {
		return ","
	}
	return text
}

// Options turns the flags into Options. The error names every flag that cannot be used.
func (f *Flags) Options(log *slog.Logger) (Options, error) {
	o := Options{Log: log}
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if f.Trust == "checksum" {
		o.Trust = fs.TrustChecksum
	}
	var err error
	if o.Adapters, err = ParseAll(f.L2, log); err != nil {
		wrong("--l2-adapter: %w", err)
	}
	for flag, v := range map[string]float64{"--disk-gb": f.DiskGB, "--disk-min-free-gb": f.DiskFree, "--disk-write-gb-per-day": f.DiskWrites} {
		if !(v >= 0 && v <= 1<<20) {
			wrong("%s %v is outside 0 to %d", flag, v, 1<<20)
		}
	}
	switch {
	case !(f.Warm >= 0 && f.Warm <= 1<<20):
		wrong("--warm %v is outside 0 to %d", f.Warm, 1<<20)
	case !(f.WarmFor > 0 && f.WarmFor <= 24*3600):
		wrong("--warm-seconds %v is not above 0 and up to %d", f.WarmFor, 24*3600)
	case f.Warm > 0 && !slices.ContainsFunc(o.Adapters, func(a Adapter) bool { return a.Type == "redis" || a.Type == "s3_native" }):
		wrong("--warm: no --l2-adapter knows what is hot; redis and s3_native do")
	}
	switch {
	case len(f.Disk) == 0 && f.DiskGB > 0:
		wrong("--disk-gb is given without --disk")
	case len(f.Disk) > 0 && f.DiskGB == 0:
		wrong("--disk needs --disk-gb: how much it may take")
	}
	for _, path := range f.Disk {
		o.Disk.Dirs = append(o.Disk.Dirs, disk.Dir{Path: path, Bytes: int64(f.DiskGB * gib)})
	}
	o.Disk.MinFree, o.Disk.WriteBudget, o.Disk.FirstTouch, o.Disk.SecondTouch, o.Disk.Log = int64(f.DiskFree*gib), int64(f.DiskWrites*gib), f.DiskAll, f.DiskAgain, log
	o.Keys = seal.Source{File: string(f.KeyFile), Command: string(f.KeyCommand), Text: EnvironmentKeys()}
	if len(f.Disk)+len(f.L2) == 0 && (f.KeyFile != "" || f.KeyCommand != "") {
		wrong("--tier-key-file and --tier-key-command encrypt tiers, and none is given: add --disk or --l2-adapter")
	}
	if len(f.Disk) > 0 && len(errs) == 0 {
		if err := o.Disk.Validate(); err != nil {
			wrong("--disk: %w", err)
		}
	}
	return o, errors.Join(errs...)
}
