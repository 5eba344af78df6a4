// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"time"
)

// Handshake port, one request and one reply per connection:
//
//	 0         8      9
//	+---------+------+-----------------+
//	|len u64LE| type | JSON text, LF   |  len counts the type byte
//	+---------+------+-----------------+
//
// A first payload byte above 3 marks the old frame: JSON without a type byte. Its reply has no type byte, either. Source: Mooncake
// 0.3.5 to 0.3.13.
const (
	frameConnection = 0 // RDMA queue pairs; TCP engines answer with empty fields
	frameMetadata   = 1 // reply: SegmentDesc
	frameNotify     = 2 // {"name","notify_msg"}
	frameProbe      = 3 // since 0.3.11
	frameTypeless   = 4 // ours: stands for the old frame; never on the wire

	// maxHandshakeBytes bounds a handshake frame, as in the engine. A longer one is an ErrProtocol, and ends the connection.
	maxHandshakeBytes = 1 << 20
)

// Descriptor is what a peer publishes about itself (Mooncake's SegmentDesc).
// The fields stand in the order of the engine's JSON.
type Descriptor struct {
	Buffers []Buffer `json:"buffers"`
	// Boot names one life of a Kvasir target; engines neither send nor read it.
	Boot string `json:"kvasir_boot,omitempty"`
	// Keeps means that the target understands opKeep; only Kvasir targets do.
	Keeps          bool      `json:"kvasir_keeps,omitempty"`
	Name           string    `json:"name"`
	Protocol       protocols `json:"protocol"`
	RDMAServerName *string   `json:"rdma_server_name,omitempty"`
	DataHost       string    `json:"tcp_data_host,omitempty"`     // since 0.3.13.post1
	DataPort       int       `json:"tcp_data_port"`               // a port number
	ProtoVersion   int       `json:"tcp_proto_version,omitempty"` // since 0.3.12; 2 means acknowledged
	Timestamp      string    `json:"timestamp"`

	fetched time.Time // when we fetched it; zero: made in this process
	proves  bool      // the peer gave it in exchange for a proof, so its data port demands a proof, too
}

// Buffer is one published region. Addr is a name, not a pointer.
type Buffer struct {
	Addr   uint64 `json:"addr"`
	Length uint64 `json:"length"`
	Name   string `json:"name"`
}

// notice is the message of the engine's notification call.
type notice struct {
	Name    string `json:"name"`
	Message string `json:"notify_msg"`
}

// protocols decodes a JSON string, or an array of strings as multi-protocol builds send it.
type protocols []string

func (p protocols) MarshalJSON() ([]byte, error) {
	if len(p) == 1 {
		return json.Marshal(p[0])
	}
	return json.Marshal([]string(p))
}

func (p *protocols) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '[' {
		return json.Unmarshal(b, (*[]string)(p))
	}
	*p = make([]string, 1)
	return json.Unmarshal(b, &(*p)[0])
}

// connectionReply is what a TCP engine answers to a connection request (frameConnection).
type connectionReply struct {
	LocalGID     string   `json:"local_gid"`
	LocalLID     int      `json:"local_lid"`
	LocalNICPath string   `json:"local_nic_path"`
	Payload      string   `json:"payload"`
	PeerNICPath  string   `json:"peer_nic_path"`
	QPNum        []uint32 `json:"qp_num"`
	ReplyMsg     string   `json:"reply_msg"`
}

type probeReply struct {
	Status string `json:"status"`
}

// parseDescriptor decodes a peer's descriptor and checks it by the rules of Mooncake's engine.
func parseDescriptor(text []byte) (*Descriptor, error) {
	d := new(Descriptor)
	if err := json.Unmarshal(text, d); err != nil {
		return nil, fmt.Errorf("%w: decode the peer's descriptor: %w", ErrProtocol, err)
	}
	if !slices.Contains(d.Protocol, "tcp") {
		return nil, fmt.Errorf("%w: peer speaks %q, not tcp", ErrProtocol, []string(d.Protocol))
	}
	if d.DataPort < 1 || d.DataPort > 65535 {
		return nil, fmt.Errorf("%w: tcp_data_port %d is outside 1 to 65535", ErrProtocol, d.DataPort)
	}
	for i, b := range d.Buffers {
		if b.Name == "" || b.Addr == 0 || b.Length == 0 {
			return nil, fmt.Errorf("%w: buffer %d of the descriptor is empty", ErrProtocol, i)
		}
	}
	return d, nil
}

// dataAddr returns the address of the peer's data port. segment ("host:port") is where the descriptor was fetched; it gives the host if
// the descriptor names none.
func (d *Descriptor) dataAddr(segment string) (string, error) {
	host := d.DataHost
	if host == "" {
		h, _, err := net.SplitHostPort(segment)
		if err != nil {
			return "", fmt.Errorf("data address of %s: %w", segment, err)
		}
		host = h
	}
	return net.JoinHostPort(host, strconv.Itoa(d.DataPort)), nil
}

// sameLife reports whether a connection that was made by the descriptor d is still good when the peer now publishes o.
func (d *Descriptor) sameLife(o *Descriptor) bool {
	return d == o || d.DataHost == o.DataHost && d.DataPort == o.DataPort && d.Boot == o.Boot && d.ProtoVersion == o.ProtoVersion && d.proves == o.proves
}

func (d *Descriptor) acked() bool { return d.ProtoVersion >= 2 }

// covers reports whether the range of n bytes at addr lies inside the published buffers. It may span buffers that adjoin each other.
func (d *Descriptor) covers(addr, n uint64) bool {
	for n > 0 {
		step := uint64(0)
		for _, b := range d.Buffers {
			if off := addr - b.Addr; addr >= b.Addr && off < b.Length {
				step = max(step, b.Length-off)
			}
		}
		if step == 0 {
			return false
		}
		if step >= n {
			return true
		}
		addr, n = addr+step, n-step
	}
	return true
}

func timestamp(t time.Time) string { return t.Format("2006-01-02 15:04:05.000000") }

// appendFrame appends a handshake frame with v as its JSON.
func appendFrame(b []byte, kind byte, v any) ([]byte, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // ends in LF, as the engine's text does
		return nil, fmt.Errorf("encode handshake: %w", err)
	}
	n := text.Len()
	if kind != frameTypeless {
		n++
	}
	if n > maxHandshakeBytes {
		return nil, fmt.Errorf("%w: handshake frame of %d bytes, at most %d", ErrProtocol, n, maxHandshakeBytes)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(n))
	if kind != frameTypeless {
		b = append(b, kind)
	}
	return append(b, text.Bytes()...), nil
}

// readFrame reads one handshake frame. It checks the length first, and its memory grows only with the bytes that arrive.
func readFrame(r io.Reader) (kind byte, text []byte, err error) {
	var length [8]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return 0, nil, fmt.Errorf("read handshake length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n == 0 || n > maxHandshakeBytes {
		return 0, nil, fmt.Errorf("%w: handshake frame of %d bytes, 1 to %d are possible", ErrProtocol, n, maxHandshakeBytes)
	}
	var buf bytes.Buffer
	if _, err := io.CopyN(&buf, r, int64(n)); err != nil {
		return 0, nil, fmt.Errorf("read handshake: %w", err)
	}
	text = buf.Bytes()
	if text[0] > frameProbe {
		return frameTypeless, text, nil
	}
	return text[0], text[1:], nil
}
