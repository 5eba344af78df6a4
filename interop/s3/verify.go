// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// account is what a key may do, and what is wrong with it.
type account struct {
	secret, token string
	ended         bool          // its time is over
	skew          time.Duration // by which the store's clock is ahead of its user's
	readOnly      bool
}

var accounts = map[string]account{
	"id":       {secret: "secret"},
	"session":  {secret: "secret", token: "token"},
	"ended":    {secret: "secret", token: "token", ended: true},
	"skewed":   {secret: "secret", skew: 20 * time.Minute},
	"readonly": {secret: "secret", readOnly: true},
}

const mostSkew = 15 * time.Minute

// verify lets requests through that are signed as Amazon's own signer does it, and refuses the
// others as S3 does.
func verify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, code := http.StatusForbidden, ""
		switch code = fault(r); code {
		case "":
			next.ServeHTTP(w, r)
			return
		case "ExpiredToken", "InvalidToken":
			status = http.StatusBadRequest
		}
		w.WriteHeader(status)
		if r.Method != http.MethodHead {
			fmt.Fprintf(w, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>refused</Message></Error>", code)
		}
	})
}

// fault returns S3's code of what is wrong with a request; empty for nothing.
func fault(r *http.Request) string {
	fields := authorization(r)
	scope := strings.Split(fields["Credential"], "/") // key/day/region/s3/aws4_request
	if len(scope) != 5 || scope[3] != "s3" {
		return "AccessDenied"
	}
	a, known := accounts[scope[0]]
	at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	switch {
	case !known:
		return "InvalidAccessKeyId"
	case err != nil:
		return "AccessDenied"
	case r.Header.Get("X-Amz-Security-Token") != a.token:
		return "InvalidToken"
	case a.ended:
		return "ExpiredToken"
	case time.Now().Add(a.skew).Sub(at).Abs() > mostSkew:
		return "RequestTimeTooSkewed"
	}
	signed := strings.Split(fields["SignedHeaders"], ";")
	again := r.Clone(r.Context())
	again.Header = make(http.Header)
	again.ContentLength = 0
	for _, name := range signed {
		switch name {
		case "host":
		case "content-length":
			again.ContentLength = r.ContentLength
		default:
			again.Header[http.CanonicalHeaderKey(name)] = r.Header.Values(name)
		}
	}
	again.URL.Host = r.Host
	signer := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true })
	keys := aws.Credentials{AccessKeyID: scope[0], SecretAccessKey: a.secret, SessionToken: a.token}
	if signer.SignHTTP(r.Context(), keys, again, r.Header.Get("X-Amz-Content-Sha256"), "s3", scope[2], at) != nil || authorization(again)["Signature"] != fields["Signature"] {
		return "SignatureDoesNotMatch"
	}
	if a.readOnly && r.Method != http.MethodGet && r.Method != http.MethodHead {
		return "AccessDenied"
	}
	return ""
}

// authorization returns what the field of that name says.
func authorization(r *http.Request) map[string]string {
	fields := make(map[string]string)
	text, _ := strings.CutPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
	for _, f := range strings.Split(text, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(f), "=")
		fields[name] = value
	}
	return fields
}
