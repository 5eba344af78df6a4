// SPDX-License-Identifier: Apache-2.0

// Package store is a client and a storage node of Mooncake Store: a cluster in which a master knows where
// objects are, and clients and storage nodes move the bytes among themselves with Mooncake's transfer engine.
//
//   - [Master] calls a real mooncake_master (coro_rpc with struct_pack bodies).
//   - [Client] puts and gets objects.
//   - [Node] gives memory to the cluster.
//
// A release of Mooncake refuses the calls of most others, because a changed struct changes the hash of a type. The Master finds out
// which known release a master has (0.3.7, 0.3.11, 0.3.12, 0.3.13 or 0.3.14) by calls that change nothing. These protocols have no
// password: keep the networks private, or name the allowed networks (NodeOptions.Networks).
package store
