// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package zmtp

// Elsewhere connections are read through net.Conn and written by the writer
// goroutine: start leaves Peer.raw nil.
const haveRaw = false

func (p *Peer) onReadable(uintptr) bool { panic("BUG: no raw reads here") }
func (p *Peer) onWritable(uintptr) bool { panic("BUG: no raw writes here") }
