// SPDX-License-Identifier: Apache-2.0

package options

import (
	"fmt"
	"strings"
)

// LeadingZero refuses a number such as 010, which some programs read as 8 and others as 10.
func LeadingZero(text string) error {
	digits := strings.TrimLeft(text, "+-")
	if len(digits) > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9' {
		return fmt.Errorf("%q has a leading zero: leave it out", text)
	}
	return nil
}
