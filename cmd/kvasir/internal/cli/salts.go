// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// saltFlags name the secrets that proxies and servers share to sign salts.
type saltFlags struct {
	SaltSecrets string `name:"salt-secret-file" help:"File of the secrets that sign cache salts (TENANT.MAC), one of 32 characters or more on each line, the same for proxies and servers: the first line signs, all lines verify. Read again when it changes." placeholder:"FILE" group:"Access"`
}

// open reads the secrets and adds them to a.
func (f *saltFlags) open(a *access) (err error) {
	if f.SaltSecrets != "" {
		if a.salts, err = auth.OpenSaltSecrets(f.SaltSecrets); err != nil {
			return fmt.Errorf("--salt-secret-file: %w", err)
		}
	}
	return nil
}

// requiredSaltFlags are the flags of a server about signed salts.
type requiredSaltFlags struct {
	saltFlags
	Count    bool `name:"count-unsigned-salts" help:"Refuse nothing yet: count and log the requests that --require-signed-salts would refuse (kvasir_unsigned_salts_total). KV of signed salts is kept by TENANT, as it is with that flag." group:"Access"`
	Required bool `name:"require-signed-salts" help:"Lookups whose cache salt no secret of --salt-secret-file signed are misses, and stores are refused; others count for the salt's TENANT. There is no memo of token lists then (--memo-mib)." group:"Access"`
}

// check returns an error for flags that contradict each other. vllmTier is the value of the server's --vllm-tier.
func (f *requiredSaltFlags) check(vllmTier string) error {
	var bad faults
	bad.unless((f.Required || f.Count) == (f.SaltSecrets != ""), "--require-signed-salts, or --count-unsigned-salts, and --salt-secret-file go together")
	bad.unless(!f.Required || !f.Count, "--require-signed-salts refuses what --count-unsigned-salts counts: give one of them")
	bad.unless(!f.Required || vllmTier == "", "--require-signed-salts cannot stand beside --vllm-tier: engines mix salts into their hashes there, and the server does not see them")
	if err := bad.err(); err != nil {
		return err
	}
	return f.open(new(access))
}
