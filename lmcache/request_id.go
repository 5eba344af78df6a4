// SPDX-License-Identifier: Apache-2.0

package lmcache

// RequestID returns the id of the engine's request, as it lies in the frame; nil where the
// operation has none.
func RequestID(r Request) []byte {
	switch r := r.(type) {
	case *LookupRequest:
		return r.Key.RequestID
	case *PrefetchStatusRequest:
		return r.RequestID
	case *FreeLookupLocksRequest:
		return r.Key.RequestID
	case *EndSessionRequest:
		return r.RequestID
	case *PrepareStoreRequest:
		return r.Key.RequestID
	case *CommitStoreRequest:
		return r.Key.RequestID
	case *PrepareRetrieveRequest:
		return r.Key.RequestID
	case *CommitRetrieveRequest:
		return r.Key.RequestID
	case *StoreRequest:
		return r.Key.RequestID
	case *RetrieveRequest:
		return r.Key.RequestID
	}
	return nil
}
