// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cli

import (
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/doctor"
)

// doctorCmd examines this machine.
type doctorCmd struct {
	L1Size     gibSize  `name:"l1-size-gb" help:"Size of the pool that is to fit: GiB, or with a unit." placeholder:"SIZE"`
	Listen     []string `help:"Addresses that are to be free for listeners, comma-separated. Default: those of kvasir server, 127.0.0.1:5555 and 127.0.0.1:8080." placeholder:"HOST:PORT"`
	Advertised []string `help:"Addresses that engines and nodes give to their peers, comma-separated: this machine connects to itself there." placeholder:"HOST[:PORT]"`
	Python     []string `help:"Python interpreters, or directories of environments, comma-separated, whose vllm, lmcache, mooncake and sglang are compared with the releases that were run with Kvasir. Engines that run are looked at anyway." placeholder:"PATH"`
	Tier       []string `help:"A tier to try, as kvasir tier check takes it; may be given several times. Objects of its own are written and removed." placeholder:"TIER" sep:"none"`
	Peer       []string `help:"URLs of other machines, comma-separated, whose clocks are compared with this one's." placeholder:"URL"`
	JSON       bool     `name:"json" help:"Print the findings as one JSON object."`
}

// Help returns the text that kvasir doctor --help shows. It implements kong's detailed help.
func (doctorCmd) Help() string {
	return `Looks at shared memory, limits, huge pages, ports, advertised addresses, users of engines and servers, releases of peers, tiers,
clocks and congestion control. It changes nothing. Exit 0: no fault; 1: warnings; 2: errors. docs/operate/doctor.md has all checks.

Examples:
  kvasir doctor
  kvasir doctor --l1-size-gb 100 --listen 10.0.0.5:5555,10.0.0.5:8080 --advertised 10.0.0.5
  kvasir doctor --tier fs:/data/kv --tier redis:10.0.0.7:6379 --peer http://10.0.0.7:8080
  kvasir doctor --python /opt/vllm/bin/python --json | jq '.findings[] | select(.level != "ok")'`
}

// Run examines the machine and prints the report.
func (c *doctorCmd) Run(e *env) error {
	r := doctor.Run(e.ctx, doctor.Options{
		PoolBytes: int64(c.L1Size), Listen: c.Listen, Advertised: c.Advertised, Pythons: c.Python, Tiers: c.Tier, Peers: c.Peer,
	})
	return e.report(r, c.JSON)
}
