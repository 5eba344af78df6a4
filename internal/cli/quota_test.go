package cli

import (
	"fmt"
	"strings"
	"testing"
)

// --quota takes salts with anything in them but a slash and its like, and refuses the rest.
func TestQuotaFlag(t *testing.T) {
	f := func(want string, quotas ...string) {
		t.Helper()
		c := serverCmd{Quota: quotas}
		got := map[string]int64{}
		err := c.checkQuotas(64 << 30)
		if err == nil {
			err = c.setQuotas(func(salt string, bytes int64) error { got[salt] = bytes; return nil })
		}
		if text := fmt.Sprint(err, got); !strings.Contains(text, want) {
			t.Errorf("%q: %s, want %s", quotas, text, want)
		}
	}
	f("<nil> map[]")
	f("<nil> map[:1073741824 _default:2147483648 a=b:4096]", "_default=1", "__default=2GiB", "a=b=4KiB")
	f(`--quota "a" is not SALT=SIZE`, "a")
	f(`--quota "=4" is not SALT=SIZE`, "=4")
	f(`--quota a: "x" is no size`, "a=x")
	f("--quota _default: the tenant has one already", "_default=1", "_default=2")
	f("--quota b: tenants: the quotas do not fit into the pool", "a=60", "b=5")
	f("--quota a/b: kv: salt longer than", "a/b=1")
}
