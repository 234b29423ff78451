"""Learned residuals of operator times: seconds = roofline * exp(r(x)), fitted on measured tables, applied with numpy alone."""
