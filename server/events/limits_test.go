// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

func limitsOf(t *testing.T, lines ...string) *auth.TenantLimits {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tenants")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := auth.OpenTenantLimits(path, func(name string) string { return name })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Subscribers that are limited to tenants know exactly what the store has of these, without a gap in the numbers: those that came early and
// late, by messages, replays and snapshots, after a clear and a restart. One without a line knows all.
func TestSubscribersOfSomeTenants(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	limits := limitsOf(t, "token a team-a", "token ab team-a team-b", "token none -")
	as := func(name string) *zmtp.PlainClient { return &zmtp.PlainClient{User: name, Password: "p"} }
	for _, batch := range []int{256, 1} {
		n := newPublishing(t, 200, Options{}, PublisherOptions{BatchEvents: batch, Interval: time.Millisecond, Tenants: limits, Clients: zmtp.Authentication{Plain: func(_, password string) bool { return password == "p" }}})
		var prompts []prompt
		of := map[string][]prompt{}
		may := map[string][]string{"a": {"team-a"}, "ab": {"team-a", "team-b"}, "none": nil, "all": {"team-a", "team-b", "team-c", ""}}
		for i := range 12 {
			salt := may["all"][i%4]
			p := prompt{model: fmt.Sprint("m", i%2), salt: salt, world: 1, tokens: make([]uint32, 3*chunkTokens)}
			for j := range p.tokens {
				p.tokens[j] = uint32(i/4*100 + j) // each prompt of each salt
			}
			prompts = append(prompts, p)
			for name, salts := range may {
				for _, s := range salts {
					if s == salt {
						of[name] = append(of[name], p)
					}
				}
			}
		}
		late, routers := map[string][]*lateRouter{}, map[string]*router{}
		for name := range may {
			late[name] = append(late[name], newLateRouterAs(t, n, "kv@node@", as(name)))
			routers[name] = newRouterAs(t, n, as(name))
		}
		for step := range 24 {
			n.storeAll(prompts[rnd.IntN(len(prompts))])
			switch step {
			case 8:
				n.store.Clear(false)
			case 16:
				for name := range may {
					late[name] = append(late[name], newLateRouterAs(t, n, "kv@node@", as(name)))
				}
			}
		}
		for _, p := range prompts {
			n.storeAll(p)
		}
		for name := range may {
			for _, r := range late[name] {
				r.until(n, of[name])
				r.close()
			}
			routers[name].until(n, of[name])
			for _, request := range [][]byte{nil, []byte(snapshotRequest)} {
				for _, w := range routers[name].ask(request) {
					b, err := event.Decode(w.payload)
					if err != nil {
						t.Fatal(err)
					}
					for _, e := range b.Events {
						if e.Kind == event.Stored && e.Parent == nil && !contains(may[name], e.Salt) {
							t.Errorf("%s is told of the tenant %q by %q", name, e.Salt, request)
						}
					}
				}
			}
			routers[name].close()
		}
	}
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
