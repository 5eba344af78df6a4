// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"
)

// ProofBytes is the length of a proof. A proof has room for one MAC per secret of a file.
const ProofBytes = maxSecrets * sha256.Size

// PeerSecrets lets both ends of a connection prove to each other that they share a secret, without sending it. A nil *PeerSecrets
// demands no proof. Its methods are safe for concurrent use.
type PeerSecrets struct {
	secretLines
	stock   []netip.Prefix
	log     *slog.Logger
	refused atomic.Uint64
	logged  atomic.Int64 // when a refusal was last logged, Unix nanoseconds
}

// OpenPeerSecrets reads a file of secrets, one of at least 32 bytes on each line. A peer may have any of them, so secrets can be
// replaced one after the other. Peers in the networks stock need no proof. log gets at most one line a minute about refused peers; a
// nil log discards it.
func OpenPeerSecrets(path string, stock []netip.Prefix, log *slog.Logger) (*PeerSecrets, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &PeerSecrets{stock: slices.Clone(stock), log: log}
	if err := s.open(path); err != nil {
		return nil, fmt.Errorf("secrets of peers: %w", err)
	}
	return s, nil
}

// Demands reports whether a peer at that address must prove that it has a secret.
func (s *PeerSecrets) Demands(at net.Addr) bool {
	if s == nil {
		return false
	}
	a, ok := at.(*net.TCPAddr)
	if !ok {
		return true
	}
	ip := a.AddrPort().Addr().Unmap().WithZone("")
	return !slices.ContainsFunc(s.stock, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// Prove returns a proof of ProofBytes for a session. role names the end that proves, so that the proof of one end is not valid for the
// other. session must contain bytes that the verifier has chosen at random.
func (s *PeerSecrets) Prove(role string, session []byte) []byte {
	proof := make([]byte, ProofBytes)
	rand.Read(proof) // places without a secret keep random bytes; never fails
	for i, secret := range *s.all.Load() {
		copy(proof[i*sha256.Size:], peerMAC(secret, role, session))
	}
	return proof
}

// Proof is a verified proof of a peer. It stays valid as long as its secret is in the file.
type Proof struct {
	secret  []byte
	version uint64
}

// Verify checks the peer's proof for a session; ok means that the proof is valid. It takes the same time for every proof.
func (s *PeerSecrets) Verify(role string, session, proof []byte) (p Proof, ok bool) {
	if len(proof) != ProofBytes {
		return p, false
	}
	p.version = s.version.Load()
	for _, secret := range *s.all.Load() {
		want := peerMAC(secret, role, session)
		for at := 0; at < len(proof); at += sha256.Size {
			if hmac.Equal(want, proof[at:at+sha256.Size]) {
				p.secret, ok = secret, true
			}
		}
	}
	return p, ok
}

// Counts reports whether a verified proof is still valid. Only one goroutine at a time may use a Proof.
func (s *PeerSecrets) Counts(p *Proof) bool {
	now := s.version.Load()
	if p.version == now {
		return true
	}
	if !slices.ContainsFunc(*s.all.Load(), func(b []byte) bool { return hmac.Equal(b, p.secret) }) {
		return false
	}
	p.version = now
	return true
}

func peerMAC(secret []byte, role string, session []byte) []byte {
	h := hmac.New(sha256.New, secret)
	_, _ = h.Write([]byte("kvasir peer\x00" + role + "\x00")) // never fails
	_, _ = h.Write(session)
	return h.Sum(nil)
}

// Refuse counts a peer without a valid proof. It logs at most one such peer a minute: the port `at` to which it came, its address, and why
// its proof was not valid.
func (s *PeerSecrets) Refuse(at, peer string, why error) {
	total := s.refused.Add(1)
	now, last := time.Now().UnixNano(), s.logged.Load()
	if now-last >= int64(time.Minute) && s.logged.CompareAndSwap(last, now) {
		s.log.Warn("a peer was refused: it did not prove that it has a secret of --transfer-secret-file, and it is not in --transfer-stock", "at", at, "peer", peer, "err", why, "refused_in_all", total)
	}
}

// Refused returns how many peers were refused.
func (s *PeerSecrets) Refused() uint64 {
	if s == nil {
		return 0
	}
	return s.refused.Load()
}
