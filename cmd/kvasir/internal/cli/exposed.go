// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// exposure describes a listener of a command, and how it is protected.
type exposure struct {
	listener string // its name in --allow-from
	at       string // the flag and the value that set its address
	host     string
	risk     string // what a client without credentials could do there

	web  bool   // --token-file and --tls-client-ca protect it
	own  bool   // it has credentials of its own, and they are configured
	keys string // flag that configures these credentials; empty: there is none
}

// allowAnyone is the only value of --allow-anyone. It names the risk.
const allowAnyone = "read-prompts"

// refuseOpen returns an error for those of the listeners `all` that are beyond loopback and have neither networks nor credentials, unless
// --allow-anyone is given. credentials means that --token-file or --tls-client-ca is given, which protect HTTP listeners.
func (f *networkFlags) refuseOpen(networks map[string]*auth.Networks, credentials bool, all []exposure) error {
	if f.AllowAnyone != "" && f.AllowAnyone != allowAnyone {
		return usagef("--allow-anyone %.40s: its one value is %s", f.AllowAnyone, allowAnyone)
	}
	var open, others []string
	for _, x := range all {
		if isLoopback(takeover.WithoutBrackets(x.host)) || networks[x.listener] != nil || x.own || x.web && credentials {
			continue
		}
		open = append(open, fmt.Sprintf("the listener %s (%s) would let everyone who reaches it %s", x.listener, x.at, x.risk))
		if x.web && !slices.Contains(others, "--token-file") {
			others = append(others, "--token-file")
		}
		if x.keys != "" {
			others = append(others, x.keys)
		}
	}
	if len(open) == 0 || f.AllowAnyone == allowAnyone {
		return nil
	}
	instead := ""
	if len(others) == len(open) { // credentials can protect every open listener
		instead = " or " + strings.Join(others, ", ")
	}
	return usagef("%s: give --allow-from %s (this machine's networks)%s; --allow-anyone=%s starts without",
		strings.Join(open, ", and "), strings.Join(localNetworks(), ","), instead, allowAnyone)
}

// maxLocalNetworks is the largest number of networks that an error names; this machine's further networks are left out.
const maxLocalNetworks = 8

// localNetworks returns values for --allow-from: the networks of this machine's interfaces, and the loopback address.
func localNetworks() []string {
	var out []string
	addresses, _ := net.InterfaceAddrs() // on an error only the loopback address is returned
	for _, a := range addresses {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		ones, _ := n.Mask.Size()
		if ip = ip.Unmap(); !ok || ip.IsLoopback() || ip.IsLinkLocalUnicast() || len(out) == maxLocalNetworks {
			continue
		}
		if p := netip.PrefixFrom(ip, ones).Masked().String(); !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return append(out, "127.0.0.1")
}

// exposed returns the network listeners of the server. It leaves out UNIX sockets: the kernel identifies their peers.
func (c *serverCmd) exposed() []exposure {
	keys, err := admin.ReadKeys(c.APIKeys, os.Getenv) // a file that cannot be read ends the start later, with its name
	out := []exposure{
		{listener: "zmq", at: "--host " + c.Host, host: c.Host, own: c.asks("zmq"), risk: "store, replace and read the KV of prompts"},
		{
			listener: "http", at: "--http-host " + c.HTTPHost, host: c.HTTPHost, web: true, own: err != nil || len(keys) > 0,
			risk: "read what is stored, and clear it",
		},
	}
	for _, x := range c.eventFlags.exposed() {
		x.own, x.keys = c.asks("events"), "--zmq-auth events=curve"
		out = append(out, x)
	}
	return out
}
