// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// Two Kvasir ends prove to each other that they have a secret in common (auth.PeerSecrets). N and M are 32 random bytes of the
// initiator and of the target. A proof is auth.ProofBytes long and covers the role of its sender, N, M and the segment name that the
// initiator dialed. So a proof is good for one connection, one end and one target only: a process in the middle, which has another
// name, cannot use it.
//
// Handshake port, metadata requests (hexadecimal digits):
//
//	{"kvasir_hello": N} ->  <- {"kvasir_challenge": M}
//	{"kvasir_proof": P} ->  <- description
//
// A target without secrets, and the C++ engine, answer the hello with their description.
//
// Data port, before the first request, to a target that asked for a proof on its handshake port:
//
//	header{size 32, helloAddr, opHello}, N ->  <- status, M
//	proof ->                                   <- status, proof of the target
//
// A target that refuses a proof answers status 1 and ends the connection.
const (
	nonceBytes = 32

	opHello   = 0x7d | opAcked
	helloAddr = 0x6f6c6c656872766b

	roleHandshake = "transfer handshake"
	roleInitiator = "transfer initiator"
	roleTarget    = "transfer target"
)

func (h header) isHello() bool { return h.op == opHello && h.addr == helloAddr && h.size == nonceBytes }

func newNonce() []byte {
	b := make([]byte, nonceBytes)
	rand.Read(b) // never fails
	return b
}

// session returns the bytes that the proofs of one connection cover: the random bytes of both ends and the dialed segment name.
func session(initiator, target []byte, name string) []byte {
	return append(slices.Concat(initiator, target), name...)
}

// proving is the part of a request or a reply of the handshake port that exchanges proofs.
type proving struct {
	Hello     string `json:"kvasir_hello,omitempty"`
	Challenge string `json:"kvasir_challenge,omitempty"`
	Proof     string `json:"kvasir_proof,omitempty"`
}

// decodeExactly decodes hexadecimal text. It returns false unless the result has n bytes.
func decodeExactly(text string, n int) ([]byte, bool) {
	b, err := hex.DecodeString(text)
	return b, err == nil && len(b) == n
}

// fetchDescriptor asks segment for its descriptor. With secrets, it proves to the segment that it has a secret, if the segment demands
// that, and demands the same proof of segments outside the stock networks. ctx must have a deadline.
func fetchDescriptor(ctx context.Context, segment string, secrets *auth.PeerSecrets) (d *Descriptor, err error) {
	err = exchange(ctx, segment, func(c net.Conn) error {
		d, err = describeOn(c, segment, secrets)
		return err
	})
	return d, err
}

func describeOn(c net.Conn, segment string, secrets *auth.PeerSecrets) (*Descriptor, error) {
	if secrets == nil {
		text, err := ask(c, frameMetadata, struct{}{})
		if err != nil {
			return nil, err
		}
		return parseDescriptor(text)
	}
	own := newNonce()
	text, err := ask(c, frameMetadata, proving{Hello: hex.EncodeToString(own)})
	if err != nil {
		return nil, err
	}
	var answer proving
	if err := json.Unmarshal(text, &answer); err != nil {
		return nil, fmt.Errorf("%w: decode the handshake's reply: %w", ErrProtocol, err)
	}
	if answer.Challenge == "" { // a C++ engine, or a Kvasir without secrets
		if secrets.Demands(c.RemoteAddr()) {
			return nil, fmt.Errorf("%w: the peer asks for no proof", ErrUnproven)
		}
		return parseDescriptor(text)
	}
	theirs, ok := decodeExactly(answer.Challenge, nonceBytes)
	if !ok {
		return nil, fmt.Errorf("%w: a challenge that is not %d bytes", ErrProtocol, nonceBytes)
	}
	proof := secrets.Prove(roleHandshake, session(own, theirs, segment))
	if text, err = ask(c, frameMetadata, proving{Proof: hex.EncodeToString(proof)}); err != nil {
		return nil, fmt.Errorf("%w: the peer refuses this end's proof: %w", ErrUnproven, err)
	}
	d, err := parseDescriptor(text)
	if err == nil {
		d.proves = true
	}
	return d, err
}

// prove exchanges proofs on a new data connection to segment, before anything else is sent on it.
func prove(ctx context.Context, c net.Conn, segment string, secrets *auth.PeerSecrets) (auth.Proof, error) {
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	p, err := proveOn(c, segment, secrets)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return p, err
}

func proveOn(c io.ReadWriter, segment string, secrets *auth.PeerSecrets) (p auth.Proof, err error) {
	own := newNonce()
	if _, err := c.Write(append(header{nonceBytes, helloAddr, opHello}.appendTo(nil), own...)); err != nil {
		return p, err
	}
	theirs := make([]byte, nonceBytes)
	if err := readAnswer(c, theirs); err != nil {
		return p, err
	}
	of := session(own, theirs, segment)
	if _, err := c.Write(secrets.Prove(roleInitiator, of)); err != nil {
		return p, err
	}
	proof := make([]byte, auth.ProofBytes)
	if err := readAnswer(c, proof); err != nil {
		return p, err
	}
	p, ok := secrets.Verify(roleTarget, of, proof)
	if !ok {
		return p, fmt.Errorf("%w: the peer's proof is wrong", ErrUnproven)
	}
	return p, nil
}

// readAnswer reads a status and returns an error unless it means success. Then it fills `into` from r.
func readAnswer(r io.Reader, into []byte) error {
	var status [statusBytes]byte
	if _, err := io.ReadFull(r, status[:]); err != nil {
		return unexpected(err)
	}
	switch code, ok := parseStatus(status[:]); {
	case !ok:
		return fmt.Errorf("%w: the peer's status does not begin with its magic number", ErrProtocol)
	case code != statusOK:
		return fmt.Errorf("%w: the peer refuses this end's proof", ErrUnproven)
	}
	_, err := io.ReadFull(r, into)
	return unexpected(err)
}

// challenge answers a hello on the handshake port and checks the proof that follows. It returns nil if the proof is valid.
func (t *Target) challenge(c *net.TCPConn, hello string) error {
	theirs, ok := decodeExactly(hello, nonceBytes)
	if !ok {
		return fmt.Errorf("%w: a hello that is not %d bytes", ErrProtocol, nonceBytes)
	}
	own := newNonce()
	reply, err := appendFrame(nil, frameMetadata, proving{Challenge: hex.EncodeToString(own)})
	if err != nil {
		return err
	}
	if _, err := c.Write(reply); err != nil {
		return err
	}
	kind, text, err := readFrame(c)
	if err != nil {
		return err
	}
	var q proving
	if err := json.Unmarshal(text, &q); err != nil || kind != frameMetadata {
		return fmt.Errorf("%w: the answer to the challenge is no proof", ErrProtocol)
	}
	proof, ok := decodeExactly(q.Proof, auth.ProofBytes)
	if !ok {
		return fmt.Errorf("%w: a proof that is not %d bytes", ErrProtocol, auth.ProofBytes)
	}
	if _, ok := t.opt.Secrets.Verify(roleHandshake, session(theirs, own, t.name), proof); !ok {
		return errWrongProof
	}
	return nil
}

// refuse counts and logs a connection whose peer did not prove that it has a secret.
func (t *Target) refuse(c net.Conn, why error) {
	if t.isClosed() {
		return
	}
	t.stats.unproven.Add(1)
	t.opt.Secrets.Refuse(c.LocalAddr().String(), c.RemoteAddr().String(), why)
}

// serveHello checks the proof of a new data connection and sends the target's own proof.
func (d *dataConn) serveHello() error {
	theirs := make([]byte, nonceBytes)
	if err := d.readFull(theirs); err != nil {
		return fmt.Errorf("%w: %w", errUnproven, err)
	}
	own := newNonce()
	if _, err := d.write([][]byte{okFrame[:], own}); err != nil {
		return fmt.Errorf("%w: %w", errUnproven, err)
	}
	proof := make([]byte, auth.ProofBytes)
	if err := d.readFull(proof); err != nil {
		return fmt.Errorf("%w: %w", errUnproven, err)
	}
	of := session(theirs, own, d.t.name)
	p, ok := d.t.opt.Secrets.Verify(roleInitiator, of, proof)
	if !ok {
		return errWrongProof
	}
	if _, err := d.write([][]byte{okFrame[:], d.t.opt.Secrets.Prove(roleTarget, of)}); err != nil {
		return err
	}
	d.proof, d.proven = p, true
	return nil
}

// demandProof returns an error for a request that comes before the proof that the target demands, or after the proof's secret was
// removed.
func (d *dataConn) demandProof() error {
	switch {
	case !d.demand:
		return nil
	case !d.proven:
		return errUnproven
	case !d.t.opt.Secrets.Counts(&d.proof):
		return errRemoved
	}
	return nil
}
