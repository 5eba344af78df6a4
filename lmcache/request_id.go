// SPDX-License-Identifier: Apache-2.0

package lmcache

// KeyOf returns the key of a request about chunks of one prompt, or nil for any other request. A request of a peer has keys of another
// type, ObjectKey.
func KeyOf(r Request) *KeyView {
	switch r := r.(type) { // not by an interface: a type assertion that fails takes a microsecond
	case *LookupRequest:
		return r.Key
	case *FreeLookupLocksRequest:
		return r.Key
	case *PrepareStoreRequest:
		return r.Key
	case *CommitStoreRequest:
		return r.Key
	case *PrepareRetrieveRequest:
		return r.Key
	case *CommitRetrieveRequest:
		return r.Key
	case *StoreRequest:
		return r.Key
	case *RetrieveRequest:
		return r.Key
	}
	return nil
}

// RequestID returns the id of the engine's request; it aliases the frame. It returns nil for an operation without such an id.
func RequestID(r Request) []byte {
	switch r := r.(type) {
	case *PrefetchStatusRequest:
		return r.RequestID
	case *EndSessionRequest:
		return r.RequestID
	}
	if k := KeyOf(r); k != nil {
		return k.RequestID
	}
	return nil
}
