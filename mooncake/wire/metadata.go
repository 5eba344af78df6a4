// SPDX-License-Identifier: Apache-2.0

package wire

// Metadata is what a scheduler sends its workers at a step.
type Metadata struct {
	Pulls []PullMeta // D
	Sends []SendMeta // P

	// Aborted are requests that ended during their pull, which D's workers may
	// give up; they report it in any case.
	Aborted []string

	// NotProcessed are the ids of transfers that P will not send; in 0.13 they are
	// request ids. Workers may not know them. Sorted; Sends come before them.
	NotProcessed []string
}

// PullMeta is a pull that D's workers are to start.
type PullMeta struct {
	RequestID string
	// Blocks to fill, one list per transferred group. Without any, P only frees
	// its blocks; nothing is reported to Update.
	Blocks [][]int

	TransferID, EngineID, BootstrapAddr string

	Host string // 0.13 only: P's side channel
	Port int    // 0.13 only: of TP rank 0
}

// SendMeta is a transfer that D will ask P's workers for.
type SendMeta struct {
	RequestID  string
	TransferID string // in 0.13 the request id
	// Blocks to send, one list per transferred group; nil says that they will be
	// known later, if at all. A worker may get them without that announcement.
	Blocks [][]int
}
