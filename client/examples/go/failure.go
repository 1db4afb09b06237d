package main

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// failure is what a failed call says: the gRPC status, and the google.rpc messages in its details (docs/errors.md).
type failure struct {
	code    codes.Code
	message string
	reason  string   // empty where the status came from gRPC itself
	advice  []string // each wrong field, and when to come back
}

func failureOf(err error) failure {
	call := status.Convert(err)
	found := failure{code: call.Code(), message: call.Message()}
	for _, detail := range call.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			found.reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				found.advice = append(found.advice, violation.Field+": "+violation.Description)
			}
		case *errdetails.RetryInfo:
			found.advice = append(found.advice, fmt.Sprintf("try again in %v", detail.RetryDelay.AsDuration()))
		}
	}
	return found
}

// isWorthARetry says whether the same call may succeed later. Once accepted it may not: the work has begun.
func (f failure) isWorthARetry(accepted bool) bool {
	// Without a reason, ResourceExhausted is a message that is too large, and Unavailable a lost connection.
	isTemporary := f.code == codes.Unavailable || f.code == codes.ResourceExhausted && f.reason != ""
	return isTemporary && !accepted
}

func (f failure) String() string {
	name := f.code.String()
	if f.reason != "" {
		name += " (" + f.reason + ")"
	}
	return strings.Join(append([]string{name + ": " + f.message}, f.advice...), "\n  ")
}
