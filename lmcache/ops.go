// SPDX-License-Identifier: Apache-2.0

// Package lmcache speaks the LMCache multiprocess protocol: its operations, as the releases 0.4.6 to 0.5.7 number them, the messages of
// each in both directions, the token-list decoder that turns a prompt into chunk hashes, and a client for servers of 0.5.6 and 0.5.7.
//
// A request is the ZMQ message [uid, operation, payload ...], a reply is
// [uid, operation, result]; each frame is one msgpack value, and a missing result
// frame means None. A server echoes the uid, and otherwise uses it only to distinguish a
// client's first request from later ones.
//
// Source of every wire fact: the lmcache Python packages and recordings of their
// clients and servers; internal/testkit holds them.
package lmcache

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Op is an operation. Operations up to 33 have LMCache's frozen integer id. Operations for which LMCache has only a name have internal ids
// above 200, which are never sent.
type Op uint8

// The operations, by their numbers in lmcache 0.5.6, where 11 is retired. generation.go
// has the numbers that differ in other generations.
const (
	OpUnknown                Op = 0
	OpRegisterKVCache        Op = 1
	OpUnregisterKVCache      Op = 2
	OpRegisterQCache         Op = 3
	OpUnregisterQCache       Op = 4
	OpStoreQ                 Op = 5
	OpStore                  Op = 6
	OpRetrieve               Op = 7
	OpLookup                 Op = 8
	OpQueryPrefetchStatus    Op = 9
	OpWaitPrefetchStatus     Op = 10
	OpQueryLookupHits        Op = 11
	OpFreeLookupLocks        Op = 12
	OpEndSession             Op = 13
	OpRegisterEngineDriven   Op = 14
	OpUnregisterEngineDriven Op = 15
	OpPrepareStore           Op = 16
	OpCommitStore            Op = 17
	OpPrepareRetrieve        Op = 18
	OpCommitRetrieve         Op = 19
	OpClear                  Op = 20
	OpGetChunkSize           Op = 21
	OpPing                   Op = 22
	OpReportBlockAllocation  Op = 23
	OpNoop                   Op = 24
	OpCBRegisterRope         Op = 25
	OpCBUnregisterRope       Op = 26
	OpCBRetrievePreComputed  Op = 27
	OpCBUnifiedLookup        Op = 28
	OpP2PLookupAndLock       Op = 29
	OpP2PQueryLookupResults  Op = 30
	OpP2PUnlockObjects       Op = 31
	OpGetExperimental        Op = 32
	OpCBProtocolHandshake    Op = 33

	OpCBReorderPlan     Op = 201
	OpSubscribeKVEvents Op = 202
	OpServerModuleCall  Op = 203

	// Since 0.5.7.
	OpNegotiateChunkSize       Op = 204
	OpServerModuleAffinityCall Op = 205
)

// String returns the operation's name on the wire.
func (o Op) String() string {
	if row := rows.byOp[o]; row != nil {
		return row.name
	}
	if o == OpUnknown {
		return "unknown"
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// Known reports whether the operation is one of the protocol's, or OpUnknown.
func (o Op) Known() bool { return o == OpUnknown || rows.byOp[o] != nil }

// ParseOp reads an operation frame of the Latest generation: a msgpack integer id or a msgpack string name. For an id or a name that is not
// in the table it returns OpUnknown and no error.
func ParseOp(frame []byte) (Op, error) {
	var one [1]Reading
	r, err := Only(Latest).Read([][]byte{nil, frame}, one[:0])
	if err != nil || len(r) == 0 {
		return OpUnknown, err
	}
	return r[0].Op, nil
}

// NameOfOp returns the name in an operation frame, also that of an unknown operation. It returns "" if the frame has a number.
func NameOfOp(frame []byte) string {
	name, _, _ := msgp.ReadStringBytes(frame)
	return name
}

// AppendOp appends the operation frame that a client of the Latest generation
// sends.
func AppendOp(b []byte, o Op) []byte {
	if o > OpCBProtocolHandshake {
		return msgp.AppendString(b, o.String())
	}
	return msgp.AppendUint8(b, uint8(o))
}
