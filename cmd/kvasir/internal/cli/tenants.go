// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// tenantFlags limit clients of a server to some tenants.
type tenantFlags struct {
	TenantFile string `name:"tenant-file" help:"File of the clients that may use some tenants alone: KIND NAME TENANT... on each line. A kind is listener (zmq, zmq:PORT, ipc, events, http), user, key (of --curve-clients), token (of --token-file) or cert (a subject); the name * stands for all others of the kind, the tenant - for none. A client must be allowed by each line that it has. Read again when it changes." placeholder:"FILE" group:"Access"`
}

// open reads the file; nil: no file is named. It returns an error for a line that can limit no client, because the operator meant it to
// limit some.
func (f *tenantFlags) open(c *serverCmd) (*auth.TenantLimits, error) {
	if f.TenantFile == "" {
		return nil, nil
	}
	l, err := auth.OpenTenantLimits(f.TenantFile, admin.SaltOf)
	if err != nil {
		return nil, fmt.Errorf("--tenant-file: %w", err)
	}
	methods, _ := c.methods() // reported elsewhere
	curve := methods["zmq"] == "curve" || methods["events"] == "curve"
	var bad faults
	bad.unless(!l.Has(auth.KindKey) || curve, "--tenant-file has a line of the kind key, which needs --zmq-auth LISTENER=curve")
	bad.unless(!l.Has(auth.KindToken) || c.TokenFile != "", "--tenant-file has a line of the kind token, which needs --token-file")
	bad.unless(!l.Has(auth.KindCert) || c.ClientCA != "", "--tenant-file has a line of the kind cert, which needs --tls-client-ca")
	bad.unless(c.VLLMTier == "", "--tenant-file cannot stand beside --vllm-tier: engines mix salts into their hashes there, and the server does not see them")
	return l, bad.err()
}

// watchTenants reads the file again whenever it changes, until the caller calls stop.
func watchTenants(l *auth.TenantLimits, log *slog.Logger) (stop func()) {
	if l == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { l.Watch(ctx, log) })
	return func() { cancel(); wg.Wait() }
}
