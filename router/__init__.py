"""Which worker answers: admission, placement, reservations. Never carries tokens and never imports `workers`."""
