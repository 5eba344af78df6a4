// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Greeting, RFC 23 section "Greeting": 64 bytes.
//
//	0     0xFF
//	1..8  padding
//	9     0x7F
//	10    major version
//	11    minor version
//	12    mechanism, 20 bytes, zero padded
//	32    as-server
//	33    filler, 31 bytes of zero
const (
	greetingBytes = 64
	majorVersion  = 3
	minorVersion  = 1
)

// Frame flags. A header is flags + 1 B length, or flags + 8 B length.
const (
	flagMore    = 0x01 // another frame of the message follows
	flagLong    = 0x02 // the length has 8 bytes, network order
	flagCommand = 0x04 // the frame is a command, never with flagMore

	maxHeader = 9
)

// maxCommandBytes bounds the body of a command; a peer that sends a longer one is closed. READY is under 300 B with the
// longest identity; PING and PONG are under 24 B.
const maxCommandBytes = 8 << 10

const (
	maxProperties   = 64    // in a READY; a peer that sends more is closed
	maxIdentity     = 255   // bytes; a longer one is refused
	maxPingContext  = 16    // bytes; a PING with a longer one is malformed
	pingHeaderBytes = 5 + 2 // 1 B name length + "PING" + 2 B TTL in tenths of a second
)

type socketType string

const (
	typeRouter socketType = "ROUTER"
	typeDealer socketType = "DEALER"
	typeReq    socketType = "REQ"
	typeRep    socketType = "REP"
	typePub    socketType = "PUB"
	typeSub    socketType = "SUB"
	typeXPub   socketType = "XPUB"
	typeXSub   socketType = "XSUB"
)

// compatible has, for each socket type of this package, the types of peers that RFC 23 allows.
var compatible = map[socketType][]socketType{
	typeRouter: {typeDealer, typeReq, typeRouter},
	typeDealer: {typeRouter, typeRep, typeDealer},
	typeReq:    {typeRep, typeRouter},
	typePub:    {typeSub, typeXSub},
	typeSub:    {typePub, typeXPub},
}

func accepts(own socketType, peer string) bool {
	for _, t := range compatible[own] {
		if string(t) == peer {
			return true
		}
	}
	return false
}

func appendGreeting(b []byte) []byte { return appendGreetingOf(b, mechanismNull, false) }

func appendGreetingOf(b []byte, mechanism string, asServer bool) []byte {
	at := len(b)
	b = append(b, make([]byte, greetingBytes)...)
	g := b[at:]
	g[0], g[8], g[9], g[10], g[11] = 0xFF, 1, 0x7F, majorVersion, minorVersion
	copy(g[12:32], mechanism)
	if asServer {
		g[32] = 1
	}
	return b
}

// checkGreeting checks the bytes of a greeting that have come so far, so that a peer that does not speak ZMTP is closed at its first
// byte. It returns the minor version once the whole greeting is in b. mechanism is our own mechanism.
func checkGreeting(b []byte, mechanism string) (minor byte, err error) {
	if len(b) > 0 && b[0] != 0xFF {
		return 0, notZMTP(b)
	}
	if len(b) > 9 && b[9]&1 == 0 {
		return 0, notZMTP(b)
	}
	if len(b) > 10 && b[10] < majorVersion {
		return 0, fmt.Errorf("%w: peer's major version is %d", errVersion, b[10])
	}
	if len(b) < greetingBytes {
		return 0, nil
	}
	if theirs := string(bytes.TrimRight(b[12:32], "\x00")); theirs != mechanism {
		return 0, fmt.Errorf("%w: the peer speaks %.20q, this socket %s", errMechanism, theirs, mechanism)
	}
	if b[10] > majorVersion { // a newer peer must adapt to our version
		return minorVersion, nil
	}
	return b[11], nil
}

func appendHeader(b []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(b, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(size))
}

// appendReady appends READY as libzmq does: our socket type `own`, then our identity, which is present even when empty.
func appendReady(b []byte, own socketType, identity []byte) []byte {
	return appendCommand(b, "READY", properties(own, identity))
}

func properties(own socketType, identity []byte) []byte {
	return appendProperty(appendProperty(nil, "Socket-Type", []byte(own)), "Identity", identity)
}

func appendProperty(b []byte, name string, value []byte) []byte {
	b = append(append(b, byte(len(name))), name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

func appendError(b []byte, reason string) []byte {
	reason = reason[:min(len(reason), 240)]
	b = appendHeader(b, flagCommand, 6+1+len(reason))
	b = append(b, "\x05ERROR"...)
	return append(append(b, byte(len(reason))), reason...)
}

// appendPing appends PING; ttl is in tenths of a second. The peer echoes context, which may be empty and must have at most
// maxPingContext bytes.
func appendPing(b []byte, ttl uint16, context []byte) []byte {
	b = appendHeader(b, flagCommand, pingHeaderBytes+len(context))
	b = binary.BigEndian.AppendUint16(append(b, "\x04PING"...), ttl)
	return append(b, context...)
}

func appendPong(b, context []byte) []byte {
	b = appendHeader(b, flagCommand, 5+len(context))
	return append(append(b, "\x04PONG"...), context...)
}

// splitCommand returns a command's name and its data.
func splitCommand(body []byte) (name, data []byte, err error) {
	if len(body) == 0 || body[0] == 0 || int(body[0]) > len(body)-1 {
		return nil, nil, fmt.Errorf("%w: malformed command %q", errProtocol, body[:min(len(body), 16)])
	}
	n := 1 + int(body[0])
	return body[1:n], body[n:], nil
}

// ready holds the properties of a READY command that we use.
type ready struct {
	socketType string
	identity   string
}

// parseReady parses the properties of READY. It compares names without regard to case (RFC 23) and skips unknown properties.
func parseReady(b []byte) (ready, error) {
	var r ready
	for n := 0; len(b) > 0; n++ {
		if n == maxProperties {
			return r, fmt.Errorf("%w: more than %d properties in READY", errProtocol, maxProperties)
		}
		nameLen := int(b[0])
		if nameLen == 0 || len(b) < 1+nameLen+4 {
			return r, fmt.Errorf("%w: truncated property in READY", errProtocol)
		}
		name := b[1 : 1+nameLen]
		size := binary.BigEndian.Uint32(b[1+nameLen:])
		b = b[1+nameLen+4:]
		if uint64(size) > uint64(len(b)) {
			return r, fmt.Errorf("%w: property %q of READY claims %d bytes, %d are left", errProtocol, name, size, len(b))
		}
		value := b[:size]
		b = b[size:]
		switch {
		case equalFold(name, "socket-type"):
			r.socketType = string(value)
		case equalFold(name, "identity"):
			if size > maxIdentity {
				return r, fmt.Errorf("%w: identity of %d bytes, at most %d", errProtocol, size, maxIdentity)
			}
			r.identity = string(value)
		}
	}
	return r, nil
}

// equalFold reports whether the ASCII name b equals lower, which is in lower case, without regard to case.
func equalFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// parsePing parses the data of PING: the TTL in tenths of a second, and the context to echo.
func parsePing(data []byte) (ttl uint16, context []byte, err error) {
	if len(data) < 2 || len(data) > 2+maxPingContext {
		return 0, nil, fmt.Errorf("%w: a PING cannot have %d bytes", errProtocol, len(data))
	}
	return binary.BigEndian.Uint16(data), data[2:], nil
}

// parseError returns the reason in an ERROR command as a *peerError.
func parseError(data []byte) error {
	if len(data) == 0 || int(data[0]) > len(data)-1 {
		return fmt.Errorf("%w: malformed ERROR", errProtocol)
	}
	return &peerError{Text: string(data[1 : 1+int(data[0])])}
}
