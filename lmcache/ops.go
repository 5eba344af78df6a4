// Package lmcache speaks the LMCache multiprocess protocol, version 0.5.6: its
// operations, the messages of each in both directions, the token-list decoder
// that turns a prompt into chunk hashes, and a client.
//
// A request is the ZMQ message [uid, operation, payload ...], a reply is
// [uid, operation, result]; each frame is one msgpack value, and a missing result
// frame means None. The uid is echoed and never decoded by a server.
//
// Source of every wire fact: the lmcache 0.5.6 Python package and recordings of
// its client and server; testdata holds them.
package lmcache

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Op is an operation. Operations up to 33 carry LMCache's frozen integer id;
// those that exist under a name only have ids of our own above 200, which never
// appear on the wire.
type Op uint8

// The operations of lmcache 0.5.6. Id 11 is retired.
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
)

// opInfo describes one operation: its name on the wire and how many payload
// frames it takes (max < 0: not checked, the operation is always refused).
type opInfo struct {
	name     string
	min, max int
}

var ops = [256]opInfo{
	OpUnknown:                {"unknown", 0, -1},
	OpRegisterKVCache:        {"register_kv_cache", 7, 7},
	OpUnregisterKVCache:      {"unregister_kv_cache", 1, 1},
	OpRegisterQCache:         {"register_q_cache", 0, -1},
	OpUnregisterQCache:       {"unregister_q_cache", 0, -1},
	OpStoreQ:                 {"store_q", 0, -1},
	OpStore:                  {"store", 4, 4},
	OpRetrieve:               {"retrieve", 5, 5},
	OpLookup:                 {"lookup", 2, 2},
	OpQueryPrefetchStatus:    {"query_prefetch_status", 1, 1},
	OpWaitPrefetchStatus:     {"wait_prefetch_status", 2, 2},
	OpFreeLookupLocks:        {"free_lookup_locks", 2, 2},
	OpEndSession:             {"end_session", 1, 1},
	OpRegisterEngineDriven:   {"register_kv_cache_engine_driven_context", 1, 1},
	OpUnregisterEngineDriven: {"unregister_kv_cache_engine_driven_context", 1, 1},
	OpPrepareStore:           {"prepare_store", 2, 2},
	OpCommitStore:            {"commit_store", 3, 3},
	OpPrepareRetrieve:        {"prepare_retrieve", 2, 2},
	OpCommitRetrieve:         {"commit_retrieve", 2, 2},
	OpClear:                  {"clear", 0, 1}, // clients up to 0.5.5 send no frame
	OpGetChunkSize:           {"get_chunk_size", 0, 0},
	OpPing:                   {"ping", 1, 1},
	OpReportBlockAllocation:  {"report_block_allocation", 3, 3},
	OpNoop:                   {"noop", 0, 0},
	OpCBRegisterRope:         {"cb_register_rope", 0, -1},
	OpCBUnregisterRope:       {"cb_unregister_rope", 0, -1},
	OpCBRetrievePreComputed:  {"cb_retrieve_pre_computed", 0, -1},
	OpCBUnifiedLookup:        {"cb_unified_lookup", 0, -1},
	OpP2PLookupAndLock:       {"p2p_lookup_and_lock", 2, 2},
	OpP2PQueryLookupResults:  {"p2p_query_lookup_results", 1, 1},
	OpP2PUnlockObjects:       {"p2p_unlock_objects", 1, 1},
	OpGetExperimental:        {"get_experimental", 0, 0},
	OpCBProtocolHandshake:    {"cb_protocol_handshake", 0, -1},
	OpCBReorderPlan:          {"cb_reorder_plan", 0, -1},
	OpSubscribeKVEvents:      {"subscribe_kv_events", 4, 4},
	OpServerModuleCall:       {"server_module_call", 1, 1},
}

var opByName = func() map[string]Op {
	m := make(map[string]Op)
	for i, o := range ops {
		if o.name != "" && Op(i) != OpUnknown {
			m[o.name] = Op(i)
		}
	}
	return m
}()

// String returns the operation's name on the wire.
func (o Op) String() string {
	if n := ops[o].name; n != "" {
		return n
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// ErrPayloads means that a request has the wrong number of payload frames.
var ErrPayloads = errors.New("lmcache: wrong number of payload frames")

// CheckPayloads returns an error that wraps ErrPayloads when n payload frames are
// not what the operation takes.
func (o Op) CheckPayloads(n int) error {
	i := ops[o]
	if i.max >= 0 && (n < i.min || n > i.max) {
		return fmt.Errorf("%w: %s takes %d, got %d", ErrPayloads, o, i.max, n)
	}
	return nil
}

// ParseOp reads an operation frame: a msgpack integer id or a msgpack string
// name. An id or name that is not in the table gives OpUnknown and no error.
func ParseOp(frame []byte) (Op, error) {
	switch msgp.NextType(frame) {
	case msgp.IntType, msgp.UintType:
		id, rest, err := readInt(frame)
		if err != nil || len(rest) != 0 {
			return OpUnknown, fmt.Errorf("operation frame: %w", errOr(err, ErrTrailing))
		}
		if id < 1 || id > int64(OpCBProtocolHandshake) || ops[id].name == "" {
			return OpUnknown, nil
		}
		return Op(id), nil
	case msgp.StrType:
		name, rest, err := msgp.ReadStringZC(frame)
		if err != nil || len(rest) != 0 {
			return OpUnknown, fmt.Errorf("operation frame: %w", errOr(err, ErrTrailing))
		}
		return opByName[string(name)], nil
	}
	return OpUnknown, errors.New("operation frame: neither an integer nor a string")
}

// AppendOp appends the operation frame a client sends.
func AppendOp(b []byte, o Op) []byte {
	if o > OpCBProtocolHandshake {
		return msgp.AppendString(b, ops[o].name)
	}
	return msgp.AppendUint8(b, uint8(o))
}

// family is what an LMCache release family calls get_chunk_size, the first call
// of every client, when that differs from 0.5.3 and later.
var family = map[Op]string{
	7: "0.3.11 to 0.3.13", 8: "0.3.14 to 0.3.15", 10: "0.4.1 to 0.4.2", 11: "0.4.3 to 0.4.5",
	16: "0.4.6", 17: "0.4.7", 18: "0.5.0 to 0.5.2",
}

// GuessFamily names the LMCache releases whose get_chunk_size would look like a
// first request with operation id and no payload; empty when it fits 0.5.3 and
// later or none.
func GuessFamily(operation []byte, payloads int) string {
	id, rest, err := readInt(operation)
	if err != nil || len(rest) != 0 || payloads != 0 || id < 0 || id > 255 {
		return ""
	}
	return family[Op(id)]
}
