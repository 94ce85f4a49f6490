"""Imports every feature's tables, so that `metadata` is whole."""

from __future__ import annotations

import batchsvc.accounts.tables
import batchsvc.audit.tables
import batchsvc.batches.tables
import batchsvc.billing.invoice_tables
import batchsvc.billing.tables
import batchsvc.files.tables
import batchsvc.webhooks.tables  # noqa: F401  imported for its effect on the metadata
from batchsvc.db.base import Base

metadata = Base.metadata
