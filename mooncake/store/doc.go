// SPDX-License-Identifier: Apache-2.0

// Package store is a client and a storage node of Mooncake Store: a cluster in which a master knows where
// objects are, and clients and storage nodes move the bytes among themselves with Mooncake's transfer engine.
//
//   - [Master] calls a real mooncake_master (coro_rpc with struct_pack bodies).
//   - [Client] puts and gets objects.
//   - [Node] gives memory to the cluster.
//
// Releases of Mooncake refuse each other's calls, since a changed struct changes the hash of a type. The
// Master finds out which of the known ones a master is, 0.3.7, 0.3.11, 0.3.12, 0.3.13 or
// 0.3.14, by calls that change nothing. None of these wires has a password: keep them private, or name networks (NodeOptions.Networks).
package store
