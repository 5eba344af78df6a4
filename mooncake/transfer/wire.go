// SPDX-License-Identifier: Apache-2.0

package transfer

import "encoding/binary"

// Data port, request header:
//
//	 0        8        16   17        24
//	+--------+--------+----+---------+
//	|size LE |addr LE | op | padding |  then size bytes of body for a write
//	+--------+--------+----+---------+
//
// The engine leaves the padding uninitialised; we send zeroes and ignore what we receive. Status frame, sent when bit 7 of op is set:
// u32 LE code, then "VTCM". Source: mooncake-transfer-engine 0.2.0 to 0.3.13 (header), 0.3.12+ (status).
const (
	headerBytes = 24
	statusBytes = 8

	opRead  = 0x00 // the target serves as a read every op whose low 7 bits are not 1
	opWrite = 0x01
	opMask  = 0x7f
	opAcked = 0x80 // a status frame answers the request

	// opKeep is an extension of ours: the first header of a connection to a target that publishes kvasir_keeps, with address keepAddr,
	// no bytes and no answer. After opKeep, the target answers a refused request with its status alone and serves the next request on
	// the same connection.
	opKeep   = 0x7e | opAcked
	keepAddr = 0x6b6565706b656570

	statusMagic    = 0x4d435456 // "MCTV"
	statusOK       = 0
	statusRejected = 1
)

// header is the decoded request header. Any 24 bytes decode to a header; the region table checks whether its range makes sense.
type header struct {
	size uint64
	addr uint64
	op   byte
}

func parseHeader(b []byte) header {
	_ = b[headerBytes-1]
	return header{
		size: binary.LittleEndian.Uint64(b),
		addr: binary.LittleEndian.Uint64(b[8:]),
		op:   b[16],
	}
}

func (h header) appendTo(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.size)
	b = binary.LittleEndian.AppendUint64(b, h.addr)
	return append(b, h.op, 0, 0, 0, 0, 0, 0, 0)
}

func (h header) isKeep() bool  { return h.op == opKeep && h.addr == keepAddr && h.size == 0 }
func (h header) isWrite() bool { return h.op&opMask == opWrite }
func (h header) acked() bool   { return h.op&opAcked != 0 }

func statusFrame(code uint32) [statusBytes]byte {
	var b [statusBytes]byte
	binary.LittleEndian.PutUint64(b[:], statusMagic<<32|uint64(code))
	return b
}

// parseStatus returns the status code of b, or false when b lacks the magic.
func parseStatus(b []byte) (code uint32, ok bool) {
	v := binary.LittleEndian.Uint64(b)
	return uint32(v), v>>32 == statusMagic
}
