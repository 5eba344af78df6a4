// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// answer is a response with a JSON body.
type answer struct {
	status int
	body   []byte
}

var okAnswer = answer{http.StatusOK, []byte(`{"status":"ok"}`)}

// detailAnswer is the answer of FastAPI's HTTPException with that status and detail.
func detailAnswer(status int, detail string) answer {
	return answer{status, append(appendPythonString([]byte(`{"detail":`), strings.ToValidUTF8(detail, "\uFFFD")), '}')}
}

// unreadableAnswer is FastAPI's answer to a body that it cannot parse.
func unreadableAnswer() answer {
	return detailAnswer(http.StatusBadRequest, "There was an error parsing the body")
}

// decodeRegistration decodes the body of POST /register. If refused is not nil, the body is invalid, and refused is the answer to send.
func decodeRegistration(contentType string, body []byte) (r Registration, refused *answer) {
	in, p, err := parseObject(contentType, body)
	if err != nil {
		a := unreadableAnswer()
		return r, &a
	}
	if len(p) == 0 {
		r.EngineID = p.Text(in, "engine_id", maxEngineIDBytes)
		r.DPRank = p.Integer(in, "dp_rank")
		r.TPRank = p.Integer(in, "tp_rank")
		r.PPRank = p.Integer(in, "pp_rank")
		r.Addr = p.Text(in, "addr", maxAddrBytes)
		r.TPSize = decodeSize(&p, in, "tp_size", r.TPRank)
		r.PPSize = decodeSize(&p, in, "pp_size", r.PPRank)
		r.Lease = decodeLease(&p, in)
	}
	if len(p) > 0 {
		return Registration{}, &answer{http.StatusUnprocessableEntity, p.Body()}
	}
	return r, nil
}

// decodeSize reads the TP or PP size in the field name of a registration. It adds a problem to p if the size is not larger than the
// worker's rank, or larger than maxSize. Stock workers send no sizes: a missing size is 0.
func decodeSize(p *problems, in bodyFields, name string, rank int) int {
	raw, ok := in[name]
	if !ok || string(raw) == "null" {
		return 0
	}
	before := len(*p)
	n := p.Integer(in, name)
	if len(*p) == before && (n < 1 || n > maxSize || rank < 0 || rank >= n) {
		p.Add("value_error", name, fmt.Sprintf("Input should be an integer from 1 to %d and larger than the rank, which is %d", maxSize, rank), raw)
	}
	return n
}

// minLease and maxLease bound the lease that a worker may request; a registration with another lease is refused.
const (
	minLease = 500 * time.Millisecond
	maxLease = 24 * time.Hour
)

func decodeLease(p *problems, in bodyFields) time.Duration {
	raw, ok := in["lease_s"]
	if !ok || string(raw) == "null" {
		return 0
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || !(f >= minLease.Seconds()) || f > maxLease.Seconds() {
		p.Add("value_error", "lease_s", fmt.Sprintf("Input should be a number of seconds from %v to %v", minLease.Seconds(), maxLease.Seconds()), raw)
		return 0
	}
	return time.Duration(f * float64(time.Second))
}
