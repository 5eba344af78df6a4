// SPDX-License-Identifier: Apache-2.0

package lmcache

// keyed are the requests about chunks of one prompt.
type keyed interface{ cacheKey() *KeyView }

func (r *KeyRange) cacheKey() *KeyView               { return r.Key }
func (r *LookupRequest) cacheKey() *KeyView          { return r.Key }
func (r *FreeLookupLocksRequest) cacheKey() *KeyView { return r.Key }

// KeyOf returns the key of a request about chunks of one prompt; nil for the other requests. Requests of peers name objects by keys of
// another kind, ObjectKey.
func KeyOf(r Request) *KeyView {
	if k, ok := r.(keyed); ok {
		return k.cacheKey()
	}
	return nil
}

// RequestID returns the id of the engine's request, as it lies in the frame; nil where the
// operation has none.
func RequestID(r Request) []byte {
	if k := KeyOf(r); k != nil {
		return k.RequestID
	}
	switch r := r.(type) {
	case *PrefetchStatusRequest:
		return r.RequestID
	case *EndSessionRequest:
		return r.RequestID
	}
	return nil
}
