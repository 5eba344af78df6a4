//go:build !unix

package transfertool

import "time"

func processTime() time.Duration { return 0 }
