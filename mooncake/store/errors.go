// SPDX-License-Identifier: Apache-2.0

package store

import "fmt"

// Code is the number of an error of the master.
type Code int32

// The codes on which a client may branch.
const (
	NoRoom        Code = -200 // there is no room now; the master has begun to evict
	BadArgument   Code = -600
	NotYours      Code = -601
	Complete      Code = -700
	NotReady      Code = -703 // the object is being put, or its node is silent: masters from 0.3.14 on hide the objects of a silent node
	NotFound      Code = -704
	Exists        Code = -705 // the object exists, is being put, or is hidden
	Leased        Code = -706
	LeaseExpired  Code = -707
	NotSupported  Code = -1012
	QuotaExceeded Code = -1700
)

var codeTexts = map[Code]string{
	NoRoom: "no room now", BadArgument: "the master refuses an argument", NotYours: "the object belongs to another client", Complete: "the object is complete already",
	NotReady: "the object cannot be read now: a client is putting it, or its node is silent, and the master hides it for about 20 s",

	NotFound: "no such object", Exists: "the object exists, or is being put, or its node is silent", Leased: "the object is leased", LeaseExpired: "the object's lease expired", NotSupported: "the master does not support the call",
	QuotaExceeded: "the quota is exceeded",
}

func (c Code) Error() string {
	if text := codeTexts[c]; text != "" {
		return fmt.Sprintf("mooncake store: %s (%d)", text, int32(c))
	}
	return fmt.Sprintf("mooncake store: error %d", int32(c))
}
