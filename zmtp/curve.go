// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/crypto/nacl/box"
)

// Key is a public or a secret key of CURVE: 32 bytes of Curve25519.
type Key [32]byte

// NewKey returns a new random secret key.
func NewKey() (secret Key) {
	_, _ = rand.Read(secret[:]) // never fails
	return secret
}

// Public returns the public key that belongs to the secret key k.
func (k Key) Public() (public Key) {
	secret, err := ecdh.X25519().NewPrivateKey(k[:])
	if err != nil {
		panic("BUG: zmtp: a key of 32 bytes is refused: " + err.Error())
	}
	return Key(secret.PublicKey().Bytes())
}

// CurveServer makes a listening socket speak CURVE only (RFC 26 of ZeroMQ): messages are encrypted, and both ends prove their keys.
type CurveServer struct {
	Secret Key
	// Client returns the name of the client with that public key, and whether it may connect. It must be safe for concurrent use.
	Client func(public Key) (name string, ok bool)
}

// CurveClient makes a connecting socket speak CURVE.
type CurveClient struct {
	Secret Key
	Server Key // the server's public key
}

const (
	tagBytes    = box.Overhead // 16
	shortNonce  = 8
	cookieBytes = 16 + tagBytes + 64
	vouchBytes  = 16 + tagBytes + 64
	// sealedBytes is how many bytes sealing adds to a frame: command name, nonce, tag and flags.
	sealedBytes = 8 + shortNonce + tagBytes + 1
)

// curve is one end's state of CURVE on a connection, as libzmq 4.3.5 speaks it. C and S are the permanent keys of client and server, C'
// and S' the keys of the connection. Box[x](a→b) is x, sealed with a's secret key for b's public key.
//
//	C: HELLO     version 1.0, 72 B of zero, C' 32 B, nonce 8 B, Box[64 zeros](C'→S)
//	S: WELCOME   nonce 16 B, Box[S' 32 B, cookie 96 B](S→C')
//	C: INITIATE  cookie 96 B, nonce 8 B, Box[C 32 B, nonce 16 B, Box[C', S](C→S'), properties](C'→S')
//	S: READY     nonce 8 B, Box[properties](S'→C')
//	   MESSAGE   nonce 8 B, Box[flags 1 B, body](C'→S' or S'→C')
type curve struct {
	own      []byte // our properties
	to       *CurveClient
	from     *CurveServer // nil: this is the client
	stage    int
	short    Key // our secret key of the connection
	theirs   Key // C' or S'
	cookie   [cookieBytes]byte
	shared   Key    // shared secret of C' and S'
	sent     uint64 // the last number that we used in a nonce
	received uint64
	user     string
	peer     []byte // the peer's properties
	scratch  []byte // scratch for seal
}

func (m *curve) name() string      { return mechanismCurve }
func (m *curve) server() bool      { return m.from != nil }
func (m *curve) peerReady() []byte { return m.peer }
func (m *curve) client() string    { return m.user }
func (m *curve) sealing() bool     { return true }

// nonceOf returns the nonce purpose + `rest`: either 16 letters and a number of 8 bytes, or 8 letters and 16 random bytes.
func nonceOf(purpose string, rest []byte) (n [24]byte) {
	copy(n[copy(n[:], purpose):], rest)
	return n
}

// numbered appends the next number of our nonces to dst, and returns the nonce made from it.
func (m *curve) numbered(dst []byte, purpose string) ([]byte, *[24]byte) {
	m.sent++
	dst = binary.BigEndian.AppendUint64(dst, m.sent)
	n := nonceOf(purpose, dst[len(dst)-shortNonce:])
	return dst, &n
}

// next checks the number at the start of data, and returns the nonce made from it. Numbers must rise, so a replayed message is refused.
func (m *curve) next(data []byte, purpose string) (*[24]byte, error) {
	number := binary.BigEndian.Uint64(data)
	if number <= m.received {
		return nil, fmt.Errorf("%w: nonce %d after %d: nonces must rise", errProtocol, number, m.received)
	}
	m.received = number
	n := nonceOf(purpose, data[:shortNonce])
	return &n, nil
}

func (m *curve) begin() []byte {
	if m.from != nil {
		return nil
	}
	m.short = NewKey()
	public := m.short.Public()
	data := append(make([]byte, 0, 194), 1, 0)
	data = append(append(data, make([]byte, 72)...), public[:]...)
	data, nonce := m.numbered(data, "CurveZMQHELLO---")
	data = box.Seal(data, make([]byte, 64), nonce, m.to.Server.ptr(), m.short.ptr())
	return appendCommand(nil, "HELLO", data)
}

func (k *Key) ptr() *[32]byte { return (*[32]byte)(k) }

func (m *curve) handle(name, data []byte) (answer []byte, done bool, err error) {
	m.stage++
	switch got := string(name); {
	case m.from != nil && m.stage == 1 && got == "HELLO":
		answer, err = m.welcome(data)
	case m.from != nil && m.stage == 2 && got == "INITIATE":
		return m.accept(data)
	case m.from == nil && m.stage == 1 && got == "WELCOME":
		answer, err = m.initiate(data)
	case m.from == nil && m.stage == 2 && got == "READY":
		return nil, true, m.finish(data)
	default:
		err = fmt.Errorf("%w: command %.20q is not possible in step %d of CURVE", errProtocol, name, m.stage)
	}
	return answer, false, err
}

var errBox = errors.New("it cannot be decrypted")

// welcome checks HELLO and returns WELCOME.
func (m *curve) welcome(data []byte) ([]byte, error) {
	if len(data) != 2+72+32+shortNonce+tagBytes+64 || data[0] != 1 || data[1] != 0 {
		return nil, fmt.Errorf("%w: HELLO of CURVE with %d bytes has a wrong length, or is not of version 1.0", errProtocol, len(data))
	}
	m.theirs = Key(data[74:106])
	nonce, err := m.next(data[106:], "CurveZMQHELLO---")
	if err != nil {
		return nil, err
	}
	if zeros, ok := box.Open(nil, data[106+shortNonce:], nonce, m.theirs.ptr(), m.from.Secret.ptr()); !ok || !bytes.Equal(zeros, make([]byte, 64)) {
		return nil, fmt.Errorf("%w: HELLO: %w: the client has the public key of another server", errAuth, errBox)
	}
	m.short = NewKey()
	_, _ = rand.Read(m.cookie[:]) // never fails. The cookie is random: the values that libzmq encodes in it stay in this struct
	public := m.short.Public()
	var long [16]byte
	_, _ = rand.Read(long[:])
	n := nonceOf("WELCOME-", long[:])
	return appendCommand(nil, "WELCOME", box.Seal(long[:], append(public[:], m.cookie[:]...), &n, m.theirs.ptr(), m.from.Secret.ptr())), nil
}

// initiate checks WELCOME and returns INITIATE.
func (m *curve) initiate(data []byte) ([]byte, error) {
	if len(data) != 16+tagBytes+32+cookieBytes {
		return nil, fmt.Errorf("%w: WELCOME of CURVE cannot have %d bytes", errProtocol, len(data))
	}
	n := nonceOf("WELCOME-", data[:16])
	text, ok := box.Open(nil, data[16:], &n, m.to.Server.ptr(), m.short.ptr())
	if !ok {
		return nil, fmt.Errorf("%w: the server's WELCOME does not open: its public key is not the one configured here", errAuth)
	}
	m.theirs = Key(text[:32])
	box.Precompute(m.shared.ptr(), m.theirs.ptr(), m.short.ptr())
	public, mine := m.to.Secret.Public(), m.short.Public()
	var long [16]byte
	_, _ = rand.Read(long[:]) // never fails
	n = nonceOf("VOUCH---", long[:])
	vouch := box.Seal(long[:], append(mine[:], m.to.Server[:]...), &n, m.theirs.ptr(), m.to.Secret.ptr())
	out, nonce := m.numbered(text[32:], "CurveZMQINITIATE")
	inside := append(append(append([]byte(nil), public[:]...), vouch...), m.own...)
	return appendCommand(nil, "INITIATE", box.SealAfterPrecomputation(out, inside, nonce, m.shared.ptr())), nil
}

// accept checks INITIATE and returns READY.
func (m *curve) accept(data []byte) (answer []byte, done bool, err error) {
	if len(data) < cookieBytes+shortNonce+tagBytes+32+vouchBytes {
		return nil, false, fmt.Errorf("%w: INITIATE of CURVE cannot have %d bytes", errProtocol, len(data))
	}
	if subtle.ConstantTimeCompare(data[:cookieBytes], m.cookie[:]) != 1 {
		return nil, false, fmt.Errorf("%w: INITIATE: the cookie is not the one that this server sent", errAuth)
	}
	data = data[cookieBytes:]
	nonce, err := m.next(data, "CurveZMQINITIATE")
	if err != nil {
		return nil, false, err
	}
	box.Precompute(m.shared.ptr(), m.theirs.ptr(), m.short.ptr())
	text, ok := box.OpenAfterPrecomputation(nil, data[shortNonce:], nonce, m.shared.ptr())
	if !ok {
		return nil, false, fmt.Errorf("%w: INITIATE: %w", errAuth, errBox)
	}
	client, vouch := Key(text[:32]), text[32:32+vouchBytes]
	n := nonceOf("VOUCH---", vouch[:16])
	says, ok := box.Open(nil, vouch[16:], &n, client.ptr(), m.short.ptr())
	ours := m.from.Secret.Public()
	if !ok || subtle.ConstantTimeCompare(says, append(append([]byte(nil), m.theirs[:]...), ours[:]...)) != 1 {
		return nil, false, fmt.Errorf("%w: INITIATE: the client does not vouch for its key", errAuth)
	}
	if m.user, ok = m.from.Client(client); !ok {
		return appendCommand(nil, "ERROR", []byte("\x03400")), false, fmt.Errorf("%w: public key %s of the client is not on the list", errAuth, client.Z85())
	}
	m.peer = text[32+vouchBytes:]
	out, nonce := m.numbered(nil, "CurveZMQREADY---")
	return appendCommand(nil, "READY", box.SealAfterPrecomputation(out, m.own, nonce, m.shared.ptr())), true, nil
}

// finish checks the READY command of the peer.
func (m *curve) finish(data []byte) error {
	if len(data) < shortNonce+tagBytes {
		return fmt.Errorf("%w: READY of CURVE cannot have %d bytes", errProtocol, len(data))
	}
	nonce, err := m.next(data, "CurveZMQREADY---")
	if err != nil {
		return err
	}
	ok := false
	if m.peer, ok = box.OpenAfterPrecomputation(nil, data[shortNonce:], nonce, m.shared.ptr()); !ok {
		return fmt.Errorf("%w: READY: %w", errAuth, errBox)
	}
	return nil
}

// The purposes of the nonces of messages.
const (
	fromClient = "CurveZMQMESSAGEC"
	fromServer = "CurveZMQMESSAGES"
)

func (m *curve) seal(dst []byte, flags byte, body []byte) []byte {
	inner, purpose := flags&flagMore, fromClient
	if flags&flagCommand != 0 {
		inner |= sealedCommand
	}
	if m.from != nil {
		purpose = fromServer
	}
	m.scratch = append(append(m.scratch[:0], inner), body...)
	dst = append(appendHeader(dst, 0, sealedBytes+len(body)), "\x07MESSAGE"...)
	dst, nonce := m.numbered(dst, purpose)
	dst = box.SealAfterPrecomputation(dst, m.scratch, nonce, m.shared.ptr())
	if cap(m.scratch) > keepBuffer {
		m.scratch = nil
	}
	return dst
}

func (m *curve) open(dst, data []byte) ([]byte, error) {
	if len(data) < shortNonce+tagBytes+1 {
		return dst, fmt.Errorf("%w: MESSAGE of CURVE cannot have %d bytes", errProtocol, len(data))
	}
	purpose := fromServer
	if m.from != nil {
		purpose = fromClient
	}
	nonce, err := m.next(data, purpose)
	if err != nil {
		return dst, err
	}
	dst, ok := box.OpenAfterPrecomputation(dst, data[shortNonce:], nonce, m.shared.ptr())
	if !ok {
		return dst, fmt.Errorf("%w: MESSAGE: %w", errAuth, errBox)
	}
	return dst, nil
}
