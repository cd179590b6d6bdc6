/// Models by their ids; there are none here.
open class AbstractModelRegistry: @unchecked Sendable {
    public init() {}
}
