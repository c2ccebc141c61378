# SPDX-License-Identifier: Apache-2.0
"""What an operator sees: log lines now; metrics and KV events are still to come."""
