"""The closed set of what is audited, as `noun.verb`; where OpenAI's audit log has the event, by its name."""

from __future__ import annotations

from enum import StrEnum


class Action(StrEnum):
    """What was done. README lists these; a new verb of an operator gets its own."""

    # accounts
    PROJECT_CREATED = "project.created"
    PROJECT_UPDATED = "project.updated"  # name, weight, quota, budget, prepaid, alerts
    PROJECT_ARCHIVED = "project.archived"
    KEY_CREATED = "api_key.created"
    KEY_UPDATED = "api_key.updated"  # scopes, expiry, rotation
    KEY_DELETED = "api_key.deleted"
    SERVICE_ACCOUNT_CREATED = "service_account.created"
    SERVICE_ACCOUNT_UPDATED = "service_account.updated"
    SERVICE_ACCOUNT_DELETED = "service_account.deleted"
    RATE_LIMIT_UPDATED = "rate_limit.updated"  # of a key or a project
    # money
    PRICES_INSTALLED = "prices.installed"
    PARTY_UPDATED = "party.updated"  # whom a project's invoices name
    INVOICE_DRAFTED = "invoice.drafted"
    INVOICE_ISSUED = "invoice.issued"
    INVOICE_PAID = "invoice.paid"
    INVOICE_VOIDED = "invoice.voided"
    INVOICE_DISPUTED = "invoice.disputed"
    CREDIT_NOTE_ISSUED = "credit_note.issued"
    TOPUP_POSTED = "topup.posted"
    PAYMENT_POSTED = "payment.posted"
    REFUND_POSTED = "refund.posted"
    CREDIT_POSTED = "credit.posted"
    # stores of tenants
    STORE_REGISTERED = "external_storage.registered"
    STORE_REMOVED = "external_storage.removed"
    # models
    MODEL_REGISTERED = "model.registered"
    MODEL_ALIASED = "model.aliased"
    MODEL_LOADED = "model.loaded"
    MODEL_UNLOADED = "model.unloaded"
    # an operator's acts on someone's batch, and on the service
    BATCH_PAUSED = "batch.paused"
    BATCH_RESUMED = "batch.resumed"
    QUARANTINE_RELEASED = "quarantine.released"
    CLAIMS_PAUSED = "claims.paused"
    CLAIMS_RESUMED = "claims.resumed"
    WORKER_DRAINED = "worker.drained"
    WORKER_UNDRAINED = "worker.undrained"
    # content and its keeping
    RESOURCE_DELETED = "resource.deleted"  # a file or a batch whose content was deleted on request
    RETENTION_UPDATED = "retention.updated"
    BACKUP_CREATED = "backup.created"
    BACKUP_RESTORED = "backup.restored"
    DATABASE_UPGRADED = "database.upgraded"
