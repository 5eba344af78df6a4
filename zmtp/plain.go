// SPDX-License-Identifier: Apache-2.0

package zmtp

import "fmt"

// PlainClient is the user name and password that a client sends with PLAIN (RFC 24 of ZeroMQ). They and all messages cross the network
// in clear text: use PLAIN only on connections that are protected in another way.
type PlainClient struct {
	User, Password string // at most 255 bytes each
}

// plain is one end's state of PLAIN on a connection. The commands are those of libzmq 4.3.5.
//
//	C: HELLO     1 B length + user, 1 B length + password
//	S: WELCOME
//	C: INITIATE  properties
//	S: READY     properties
type plain struct {
	own     []byte // our properties
	account *PlainClient
	check   func(user, password string) bool // nil: this is the client
	stage   int
	user    string
	peer    []byte // the peer's properties
}

func (m *plain) name() string                             { return mechanismPlain }
func (m *plain) server() bool                             { return m.check != nil }
func (m *plain) peerReady() []byte                        { return m.peer }
func (m *plain) client() string                           { return m.user }
func (m *plain) sealing() bool                            { return false }
func (m *plain) seal(dst []byte, _ byte, _ []byte) []byte { return dst }
func (m *plain) open(dst, _ []byte) (_ []byte, err error) { return dst, nil }

func (m *plain) begin() []byte {
	if m.check != nil {
		return nil
	}
	data := append([]byte{byte(len(m.account.User))}, m.account.User...)
	data = append(append(data, byte(len(m.account.Password))), m.account.Password...)
	return appendCommand(nil, "HELLO", data)
}

func (m *plain) handle(name, data []byte) (answer []byte, done bool, err error) {
	m.stage++
	switch got := string(name); {
	case m.check != nil && m.stage == 1 && got == "HELLO":
		user, rest, ok := cutShort(data)
		password, rest, ok2 := cutShort(rest)
		if !ok || !ok2 || len(rest) > 0 {
			return nil, false, fmt.Errorf("%w: malformed HELLO", errProtocol)
		}
		if !m.check(string(user), string(password)) {
			return appendCommand(nil, "ERROR", []byte("\x03400")), false, fmt.Errorf("%w: the client's user or password is wrong", errAuth)
		}
		m.user = string(user)
		return appendCommand(nil, "WELCOME", nil), false, nil
	case m.check != nil && m.stage == 2 && got == "INITIATE":
		m.peer = append([]byte(nil), data...)
		return appendCommand(nil, "READY", m.own), true, nil
	case m.check == nil && m.stage == 1 && got == "WELCOME" && len(data) == 0:
		return appendCommand(nil, "INITIATE", m.own), false, nil
	case m.check == nil && m.stage == 2 && got == "READY":
		m.peer = append([]byte(nil), data...)
		return nil, true, nil
	}
	return nil, false, fmt.Errorf("%w: command %.20q is not possible in step %d of PLAIN", errProtocol, name, m.stage)
}

// cutShort splits b into a text, whose length the first byte gives, and the rest.
func cutShort(b []byte) (text, rest []byte, ok bool) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return nil, nil, false
	}
	return b[1 : 1+int(b[0])], b[1+int(b[0]):], true
}
