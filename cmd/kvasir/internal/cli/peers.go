// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// peerFlags say how the two ends of a transfer prove their identity to each other.
type peerFlags struct {
	TransferSecrets string   `name:"transfer-secret-file" help:"File of secrets, one of 32 characters or more on each line, the same for all Kvasir commands that transfer: on transfer ports both ends prove that they have one of them, and who does not is refused. All lines count, so a secret is exchanged by adding the new one everywhere and then removing the old one. Read again when it changes." placeholder:"FILE" group:"Access"`
	TransferStock   []string `name:"transfer-stock" help:"Networks (CIDR) and addresses, comma-separated, whose peers prove nothing, such as vLLM with Mooncake's own transfer engine." placeholder:"CIDR" group:"Access"`
}

// stock returns the networks of --transfer-stock.
func (f *peerFlags) stock() (out []netip.Prefix, _ error) {
	var bad faults
	for _, text := range f.TransferStock {
		p, err := auth.ParseNetwork(text)
		bad.unless(err == nil, "--transfer-stock %v", err)
		out = append(out, p)
	}
	bad.unless(len(f.TransferStock) == 0 || f.TransferSecrets != "", "--transfer-stock says who needs no secret of --transfer-secret-file, which is missing")
	return out, bad.err()
}

// open reads the file of secrets; nil: no file is named, and no proof is demanded.
func (f *peerFlags) open(log *slog.Logger) (*auth.PeerSecrets, error) {
	stock, err := f.stock()
	if err != nil || f.TransferSecrets == "" {
		return nil, err
	}
	s, err := auth.OpenPeerSecrets(f.TransferSecrets, stock, log)
	if err != nil {
		return nil, fmt.Errorf("--transfer-secret-file: %w", err)
	}
	return s, nil
}

// check returns an error for flags and files that cannot be used.
func (f *peerFlags) check() error {
	_, err := f.open(slog.New(slog.DiscardHandler))
	return err
}

// defends reports whether the secrets keep strangers away from a transfer port. They do not if --transfer-stock names a network of all
// addresses.
func (f *peerFlags) defends() bool {
	stock, err := f.stock()
	for _, p := range stock {
		if p.Bits() == 0 {
			return false
		}
	}
	return err == nil && f.TransferSecrets != ""
}

// watchPeers reads the secrets again whenever they change, until the caller calls stop.
func watchPeers(s *auth.PeerSecrets, log *slog.Logger) (stop func()) {
	if s == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.Watch(ctx, log) })
	return func() { cancel(); wg.Wait() }
}
