// Package kv is Kvasir's vocabulary: chunk hashes and object keys of the LMCache
// key scheme, and the byte layout of a chunk. It does no I/O.
package kv
