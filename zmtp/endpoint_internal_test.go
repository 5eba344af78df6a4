// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Without /etc/hosts, as in an image from scratch, localhost is 127.0.0.1 for those that listen and those that connect.
func TestLocalhostWithoutHosts(t *testing.T) {
	if os.Getenv("TEST_WITHOUT_HOSTS") == "" {
		c := exec.Command("unshare", "--mount", "--net", "sh", "-euc", `ip link set lo up; mount --bind /dev/null /etc/hosts; mount --bind /dev/null /etc/resolv.conf; exec "$0" -test.run '^TestLocalhostWithoutHosts$' -test.v`, os.Args[0])
		c.Env = append(os.Environ(), "TEST_WITHOUT_HOSTS=1")
		if out, err := c.CombinedOutput(); err != nil && !strings.Contains(string(out), "=== RUN") {
			t.Skipf("no namespaces: %v, %s", err, out)
		} else if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	if _, err := net.LookupHost("localhost"); err == nil {
		t.Skip("the resolver knows it all the same")
	}
	l, err := listen(t.Context(), "tcp://localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := dial(t.Context(), fmt.Sprintf("tcp://localhost:%d", l.Addr().(*net.TCPAddr).Port))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
