// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// quotasOnly notes quotas.
type quotasOnly map[string]int64

func (q quotasOnly) SetQuota(salt string, bytes int64) error    { q[salt] = bytes; return nil }
func (q quotasOnly) SetTTL(string, time.Duration) error         { return nil }
func (q quotasOnly) SetPinLimit(salt string, bytes int64) error { return nil }

// --quota takes salts with anything in them but a slash and its like, and refuses the rest.
func TestQuotaFlag(t *testing.T) {
	f := func(want string, quotas ...string) {
		t.Helper()
		c := serverCmd{Quota: quotas}
		got := map[string]int64{}
		err := c.checkTenants(64 << 30)
		if err == nil {
			err = c.setTenants(quotasOnly(got))
		}
		if text := fmt.Sprint(err, got); !strings.Contains(text, want) {
			t.Errorf("%q: %s, want %s", quotas, text, want)
		}
	}
	f("<nil> map[]")
	f("<nil> map[:1073741824 _default:2147483648 a=b:4096]", "_default=1", "__default=2GiB", "a=b=4KiB")
	f(`--quota "a" is not SALT=VALUE, as in team-a=20GiB`, "a")
	f(`--quota "=4" is not SALT=VALUE`, "=4")
	f(`--quota a: "x" is no size`, "a=x")
	f("--quota _default: the tenant is listed twice", "_default=1", "_default=2")
	f("--quota b: tenant: the quotas do not fit into the pool", "a=60", "b=5")
	f("--quota a/b: kv: salt longer than", "a/b=1")
}

// --tenant-ttl and --pin-limit are read like --quota, and an error names the flag.
func TestTTLAndPinFlags(t *testing.T) {
	f := func(want string, c serverCmd) {
		t.Helper()
		if err := fmt.Sprint(c.checkTenants(64 << 30)); !strings.Contains(err, want) {
			t.Errorf("%s, want %s", err, want)
		}
	}
	f("<nil>", serverCmd{OwnTTL: []string{"a=90s", "b=24h", "_default=never"}, TTL: 1.5, PinLimit: []string{"a=4GiB"}})
	f("--ttl-seconds 0.5 is neither 0 (no limit) nor at least 1", serverCmd{TTL: 0.5})
	f(`--tenant-ttl a: "soon" is no time from 1s`, serverCmd{OwnTTL: []string{"a=soon"}})
	f(`--tenant-ttl a: "10ms" is no time from 1s`, serverCmd{OwnTTL: []string{"a=10ms"}})
	f("--tenant-ttl a: the tenant is listed twice", serverCmd{OwnTTL: []string{"a=1h", "a=2h"}})
	f(`--tenant-ttl "a" is not SALT=VALUE, as in team-a=24h`, serverCmd{OwnTTL: []string{"a"}})
	f("--pin-limit b: tenant: the quotas do not fit into the pool", serverCmd{Quota: []string{"a=60"}, PinLimit: []string{"a=60", "b=5"}})
}
